"""Finds the hosts of an elastic job: by running a script of the user, or by asking Slurm which nodes are up."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from ddlcore.contracts.allocation import granted_hosts
from ddlcore.contracts.discovery import HostDiscovery
from ddlcore.contracts.launcher import HostSlots

_SCRIPT_S = 30.0  # how long a script may run
_HOST = r"(?P<host>([\w.-]+@)?(\[[0-9a-fA-F:.]+(%\w+)?\]|[\w.-]+))"
_LINE = re.compile(_HOST + r"(:(?P<slots>[1-9][0-9]{0,5}))?")
_AWAY = re.compile(r"DOWN|DRAIN|FAIL|NOT_RESPONDING|\*|POWER|REBOOT|MAINT|UNKNOWN")


class ScriptDiscovery(HostDiscovery):
    """A host discovery that runs a script of the user.

    The script prints one host per line, as HOST:SLOTS or as HOST, in the same format as for Horovod.
    """

    def begin(self, environ: Mapping[str, str], settings: Mapping[str, str | int | float | bool]) -> None:
        self._script = str(settings["host_discovery_script"])
        self._slots = int(settings["slots_per_host"])
        if not self._script:
            raise ValueError("--host-discovery script: say which one by --host-discovery-script FILE")

    def hosts(self) -> Sequence[HostSlots]:
        """Run the script, and return the hosts that it prints.

        Raises ValueError if the script fails, takes longer than 30 s, prints an invalid line, or prints a host twice.
        """
        where = f"--host-discovery-script {self._script}"
        try:
            done = subprocess.run(
                self._script, capture_output=True, text=True, timeout=_SCRIPT_S, stdin=subprocess.DEVNULL, shell=True
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"{where} has not ended after {_SCRIPT_S:g} s") from None
        except OSError as error:
            raise ValueError(f"{where}: {error.strerror}") from None
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["it wrote nothing to stderr"]
            raise ValueError(f"{where} ended with code {done.returncode}: {last[0]}")
        found: dict[str, int] = {}
        for line in filter(None, map(str.strip, done.stdout.splitlines())):
            match = _LINE.fullmatch(line)
            if match is None or match["host"] in found:
                what = "is listed twice" if match is not None else "is not of the form HOST or HOST:SLOTS"
                raise ValueError(f"{where}: '{line}' {what}")
            found[match["host"]] = int(match["slots"] or self._slots)
        return [HostSlots(host, slots) for host, slots in found.items()]


class SlurmDiscovery(HostDiscovery):
    """A host discovery that returns those nodes of the Slurm allocation that are up.

    So a node that has failed is used again as soon as it is up again.
    """

    def begin(self, environ: Mapping[str, str], settings: Mapping[str, str | int | float | bool]) -> None:
        if "SLURM_JOB_ID" not in environ:
            raise ValueError("--host-discovery slurm: this is no Slurm job (SLURM_JOB_ID is not set)")
        self._granted = granted_hosts(environ)
        self._environ = dict(environ)

    def hosts(self) -> Sequence[HostSlots]:
        """Ask Slurm for the states of the nodes, and return the nodes that are up.

        Raises ValueError if the command ``scontrol`` fails or does not answer within 30 s.
        """
        names = ",".join(one.host for one in self._granted)
        command = ["scontrol", "--oneliner", "show", "node", names]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SCRIPT_S, env=self._environ)
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"scontrol show node: {error}") from None
        if done.returncode:
            raise ValueError(f"scontrol show node: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
        states = dict(re.findall(r"^NodeName=(\S+).*?\bState=(\S+)", done.stdout, re.MULTILINE))
        return [one for one in self._granted if not _AWAY.search(states.get(one.host, "UNKNOWN"))]
