"""A Slurm cluster on a test cluster: every host is a node, the first one runs the controller; munge authenticates."""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tools.test_cluster.cluster import Host, TestCluster
from tools.test_cluster.possible import in_sbin, why_no_cluster

__all__ = ["Slurm", "why_no_slurm"]

_PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "sbatch": "slurm-wlm",
}
_CONFIGURATION = Path("/etc/slurm")  # where Debian's Slurm looks for its configuration
_STARTING_S = 20.0
_LOOK_S = 0.1
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

# More cores, memory and GPUs than there are, so that any job can ask for what a real cluster has. The GPUs are fakes.
_SLURM_CONF = """\
ClusterName=cluster
SlurmctldHost=server1
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
MpiDefault=none
KillWait=2
GresTypes=gpu
NodeName=server[1-{nodes}] CPUs=64 RealMemory=512000 Gres=gpu:4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_GRES_CONF = "".join(f"Name=gpu File=/dev/{device}\n" for device in ("null", "zero", "full", "urandom"))

_MUNGE = """\
set -e
mkdir -m 755 /run/munge /run/slurm /run/slurm/state /run/slurm/spool
umask 077
cat >/run/munge/key
umask 022
exec munged --key-file=/run/munge/key --log-file=/run/munge/log --seed-file=/run/munge/seed \\
    --pid-file=/run/munge/pid --socket=/run/munge/munge.socket.2
"""


def why_no_slurm() -> str:
    """Return in one line why there can be no Slurm cluster here, or ""."""
    lacking = sorted({package for program, package in _PROGRAMS.items() if in_sbin(program) is None})
    if lacking:
        return f"a Slurm cluster needs {', '.join(lacking)}: apt-get install {' '.join(lacking)}"
    if not _CONFIGURATION.is_dir():
        return f"a Slurm cluster needs a Slurm that reads {_CONFIGURATION}, and there is no such folder"
    return why_no_cluster()


class Slurm:
    """A cluster of ``nodes`` hosts, server1, server2, …, which is up inside the ``with`` block.

    ``cluster`` is the test cluster below it. Raises ``RuntimeError`` if ``why_no_slurm()`` has a reason, or if the
    cluster does not come up. Only one thread may use it.
    """

    def __init__(self, nodes: int = 1, *, rate_mbit: float | None = None) -> None:
        files = {"slurm/slurm.conf": _SLURM_CONF.format(nodes=nodes), "slurm/gres.conf": _GRES_CONF}
        hosts = [Host(binds={str(_CONFIGURATION): "slurm"})] * nodes
        self.cluster = TestCluster(hosts, rate_mbit=rate_mbit, files=files)

    def __enter__(self) -> Slurm:
        why = why_no_slurm()
        if why:
            raise RuntimeError(why)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.cluster)
            key = secrets.token_hex(64)
            for name in self.cluster.names:
                self._daemon(name, ["sh", "-c", _MUNGE], key)
            self._daemon("server1", ["slurmctld"])
            for name in self.cluster.names:
                self._daemon(name, ["slurmd"])
            self._await_nodes()
            for name in self.cluster.names:
                self.cluster.disregard(name)
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every job, every daemon and the test cluster. May be called twice."""
        self.cluster.close()

    def _daemon(self, name: str, argv: Sequence[str], told: str = "") -> None:
        """Start a daemon, which goes into the background when it is ready, or reports why it is not."""
        self.cluster.run(name, argv, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, told=told, check=True, as_root=True)

    def _await_nodes(self) -> None:
        deadline_s = time.monotonic() + _STARTING_S
        states = ""
        while states != "idle" * len(self.cluster.names):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the nodes are {states or '?'} after {_STARTING_S:g} s: {self.logs()}")
            time.sleep(_LOOK_S)
            states = "".join(self.run(["sinfo", "--noheader", "--Node", "--format=%t"]).stdout.split())

    def logs(self) -> str:
        """Return the last lines that the daemons logged."""
        return "".join(
            self.cluster.run(name, ["sh", "-c", "tail -n 50 /run/slurm/*.log"], as_root=True).stdout
            for name in self.cluster.names
        )

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout_s: float = 50.0,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, such as srun, on the first node, as ``TestCluster.run`` does."""
        return self.cluster.run("server1", argv, env=env, cwd=cwd, timeout_s=timeout_s, check=check)

    def submit(self, argv: Sequence[str | Path], *, cwd: str | Path, env: Mapping[str, str] | None = None) -> int:
        """Run ``sbatch`` with these arguments, and return the job's number. Raises RuntimeError if it is refused."""
        answer = self.run(["sbatch", "--parsable", *argv], cwd=cwd, env=env, check=True)
        return int(answer.stdout.split(";")[0])

    def wait(self, job: int, timeout_s: float = 50.0) -> tuple[str, int]:
        """Wait for a job, and return its state (COMPLETED, FAILED, CANCELLED, …) and its exit status.

        Raises ``TimeoutError`` if it does not end in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            shown = self.run(["scontrol", "--oneliner", "show", "job", str(job)], check=True).stdout
            found = re.search(r"JobState=(\w+).* ExitCode=(\d+):(\d+)", shown)
            if found is not None and found[1] in _ENDED:
                return found[1], int(found[2])
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"job {job} has not ended within {timeout_s:g} s: {shown}")
            time.sleep(_LOOK_S)

    def cancel(self, job: int) -> None:
        """Cancel a job with ``scancel``."""
        self.run(["scancel", str(job)], check=True)
