"""Starts agents by ssh on the hosts that a batch system has granted to the job, for batch systems other than Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlcore.builtin.ssh import SshLauncher
from ddlcore.contracts.allocation import granted_hosts
from ddlcore.contracts.launcher import HostSlots, Launcher, StartCommand, StartPlan


class GrantedLauncher(Launcher):
    """A launcher that starts agents by ssh on the hosts that a batch system has granted to the job.

    So the user need not name the hosts.
    """

    def __init__(self) -> None:
        self._ssh = SshLauncher()

    def hosts(self, environ: Mapping[str, str]) -> Sequence[HostSlots]:
        """Return the hosts that the batch system grants, each with the number of ranks that may run on it.

        ``environ`` is the environment that the batch system has set.
        """
        return granted_hosts(environ)

    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        return self._ssh.commands(plan)

    def explain(self, host: str, code: int | None, text: str) -> str:
        """Return one line that says why the agent of ``host`` did not connect, as ``SshLauncher.explain`` does.

        ``code`` is the exit code of the agent's command, or None while the command still runs. ``text`` is the
        command's output.
        """
        return self._ssh.explain(host, code, text)

    def proves_end(self, code: int) -> bool:
        """Return what ``SshLauncher.proves_end`` returns."""
        return self._ssh.proves_end(code)
