"""Hosts that a batch system other than Slurm grants, from the lists that it leaves; agents get there by ssh."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddlcore.builtin.ssh import SshLauncher
from ddlcore.contracts.launcher import HostSlots, Launcher, StartCommand, StartPlan

__all__ = ["CobaltLauncher", "GridEngineLauncher", "LsfLauncher", "PbsLauncher"]


class _Granted(Launcher):
    def __init__(self) -> None:
        self._ssh = SshLauncher()

    def hosts(self, environ: Mapping[str, str]) -> Sequence[HostSlots]:
        """As the batch system lists them; a host that comes several times has the sum of its slots."""
        slots: dict[str, int] = {}
        for host, count in self._listed(environ):
            slots[host] = slots.get(host, 0) + count
        return [HostSlots(host, count) for host, count in slots.items()]

    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        return self._ssh.commands(plan)

    def explain(self, host: str, code: int | None, text: str) -> str:
        """As over ssh."""
        return self._ssh.explain(host, code, text)

    @abstractmethod
    def _listed(self, environ: Mapping[str, str]) -> Sequence[tuple[str, int]]:
        """Hosts and slots. Raises ValueError in one line that names the variable."""


class LsfLauncher(_Granted):
    """LSF: one line a slot in a file, or pairs of host and slots in a variable."""

    def _listed(self, environ: Mapping[str, str]) -> Sequence[tuple[str, int]]:
        if "LSB_DJOB_HOSTFILE" in environ:
            return [(fields[0], 1) for fields in _lines(environ, "LSB_DJOB_HOSTFILE")]
        words = environ.get("LSB_MCPU_HOSTS", "").split()
        if len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
            raise ValueError(f"LSB_MCPU_HOSTS={' '.join(words)} is no list of hosts and slots such as a 4 b 4")
        return [(host, int(count)) for host, count in zip(words[::2], words[1::2])]


class PbsLauncher(_Granted):
    """PBS and Torque: one line a slot."""

    def _listed(self, environ: Mapping[str, str]) -> Sequence[tuple[str, int]]:
        return [(fields[0], 1) for fields in _lines(environ, "PBS_NODEFILE")]


class CobaltLauncher(_Granted):
    """Cobalt: one line a slot."""

    def _listed(self, environ: Mapping[str, str]) -> Sequence[tuple[str, int]]:
        return [(fields[0], 1) for fields in _lines(environ, "COBALT_NODEFILE")]


class GridEngineLauncher(_Granted):
    """Grid Engine: a line for each host and queue, with the slots behind the host."""

    def _listed(self, environ: Mapping[str, str]) -> Sequence[tuple[str, int]]:
        listed = []
        for fields in _lines(environ, "PE_HOSTFILE"):
            if len(fields) < 2 or not fields[1].isdigit():
                raise ValueError(f"PE_HOSTFILE={environ['PE_HOSTFILE']}: '{' '.join(fields)}' is not HOST SLOTS …")
            listed.append((fields[0], int(fields[1])))
        return listed


def _lines(environ: Mapping[str, str], name: str) -> list[list[str]]:
    """The fields of each line of the file that ``name`` names."""
    path = environ[name]
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{name}={path}: {getattr(error, 'strerror', None) or error}; unset it where there is no such job"
        ) from None
    return [line.split() for line in text.splitlines() if line.strip()]
