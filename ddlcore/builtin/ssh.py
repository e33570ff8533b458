"""Builds the commands that start agents on other hosts, by ssh or by another remote shell with the same syntax.

There is one command for each host. This module does not run the commands.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence

from ddlcore.contracts.launcher import Launcher, StartCommand, StartPlan

REMOTE_SHELL = "OMPI_MCA_plm_rsh_agent"  # Kubeflow's launcher pods set it to a script that reaches their worker pods
_OPTIONS = (
    "-T",  # no terminal, which would change the output
    "-oBatchMode=yes",  # ask no questions: nobody could answer them
    "-oStrictHostKeyChecking=accept-new",  # trust a new host, but not one whose key has changed
    "-oConnectTimeout=10",
    "-oControlPath=none",  # no shared connection, because it may stay open after the job
    "-oLogLevel=ERROR",
)
_REASONS = (  # a message of ssh or of the remote shell, and what to report instead
    (
        r"Permission denied \(|Permission denied, please",
        "it does not accept our key; try `{ssh} {host} true`, and name the key by --ssh-identity-file",
    ),
    (
        r"Host key verification failed|IDENTIFICATION HAS CHANGED",
        "its host key is not the known one; see `ssh-keygen -R {host}`",
    ),
    (r"Could not resolve hostname|Name or service not known", "no such host; is its name spelled right?"),
    (r"Connection timed out|timed out", "it does not answer; is it up, and is the port right (--ssh-port)?"),
    (r"Connection refused", "nothing listens for ssh there; is sshd running, and is the port right (--ssh-port)?"),
    (r"No route to host|Network is unreachable", "no route leads to it"),
    (r"No module named '?ddlcore", "ddlcore is not installed there; install the same version as here"),
)


class SshLauncher(Launcher):
    """A launcher that starts the agent of each host by a command ``ssh HOST exec PYTHON …``.

    The agent gets the job's key by standard input.
    """

    def __init__(self) -> None:
        self._shell = "ssh"
        self._passes_codes_on = True

    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        shell = plan.environ.get(REMOTE_SHELL, "")
        if shell:
            return [self._by_shell(shlex.split(shell), plan, place.index, place.host) for place in plan.agents]
        argv = ["ssh", *_OPTIONS]
        if plan.settings["ssh_port"]:
            argv += ["-p", str(plan.settings["ssh_port"])]
        if plan.settings["ssh_identity_file"]:
            argv += ["-i", str(plan.settings["ssh_identity_file"])]
        argv += shlex.split(str(plan.settings["launcher_args"]))
        self._shell = shlex.join(arg for arg in argv if arg not in _OPTIONS)
        start = f"exec {shlex.join(plan.program)}"
        names = [re.sub(r"[][]", "", place.host) for place in plan.agents]  # brackets may also follow USER@
        return [StartCommand((*argv, name, start), (place.index,)) for name, place in zip(names, plan.agents)]

    def _by_shell(self, shell: list[str], plan: StartPlan, index: int, host: str) -> StartCommand:
        """Return the command that starts the agent number ``index`` on ``host`` by the remote shell ``shell``.

        The ``task`` of the command is "public": the job's key is not passed by standard input, because the remote
        shell may not forward standard input. For example, `kubectl exec` without -i does not forward it.
        """
        self._shell = shell[0]
        self._passes_codes_on = False  # `kubectl exec` ends with 1 where its own stream breaks, too
        start = shlex.join((*plan.program, *plan.public, str(index)))
        return StartCommand((*shell, host, f"exec {start}"), (index,), task="public")

    def address(self, host: str, environ: Mapping[str, str]) -> str:
        """Return the network name of ``host``.

        If the name cannot be resolved, it may be an alias in ssh's own configuration. In this case, return the name
        that this configuration gives for the alias.
        """
        name = super().address(host, environ)
        if environ.get(REMOTE_SHELL):
            return name
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                shown = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=5.0).stdout
                found = re.search(r"^hostname (\S+)$", shown, re.MULTILINE)
                return found[1] if found else name
        return name

    def proves_end(self, code: int) -> bool:
        """Return whether ``code`` is the exit code of the agent, which ssh has passed on.

        It is not if ``code`` is 255: ssh itself ends with 255 if its connection has ended. It is negative if a signal has
        ended ssh on this host. Nothing is known of the codes of another remote shell.
        """
        return self._passes_codes_on and 0 <= code < 255

    def explain(self, host: str, code: int | None, text: str) -> str:
        """Return one line that says why the agent of ``host`` did not connect.

        ``code`` is the exit code of the ssh command; None while the command still runs. ``text`` is the command's
        output. If ``text`` contains a well-known message of ssh, the line explains this message and says what to do. In
        other cases, the line contains the last line of ``text``.
        """
        for pattern, what in _REASONS:
            if re.search(pattern, text, re.IGNORECASE):
                return f"{host}: {what.format(host=host, ssh=self._shell)}"
        missing = re.search(r"(/\S*python\S*): (?:No such file|not found|Permission denied|cannot execute)", text)
        if missing or code in (126, 127):
            what = missing[1] if missing else "Python of this environment"
            return f"{host}: there is no {what} to run; every host needs the same environment at the same path"
        return super().explain(host, code, text)
