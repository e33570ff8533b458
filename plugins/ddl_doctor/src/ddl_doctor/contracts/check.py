"""The check contract: how ``ddl doctor`` inspects every host and reports problems.

The rules:

* ``look`` runs on the inspected host and returns facts. ``judge`` and ``show`` run on the user's host and get the facts
  of all hosts. Facts are plain data that JSON can represent, so facts that were recorded on one machine can be judged
  on another.
* A check changes nothing and never raises an exception. If a check cannot find out a fact, it leaves that fact out.
* A check reads facts only from its ``HostView``: files below a root that tests can choose, the environment, the
  installed distributions, and the GPUs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Check", "Finding", "Gpu", "GpuFacts", "HostView", "Links", "Matrix", "Seen"]

_PATIENCE_S = 5.0  # timeout for a program that prints its version
_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One problem that a check has found: something that is wrong or slow."""

    check: str  # the name of the check that found it
    what: str  # one line: the problem, and where it is
    means: str  # the consequence of the problem
    fix: str  # what the user should do; a command line if there is one
    where: str = ""  # the host or rank; "" means everywhere


@dataclass(frozen=True)
class Matrix:
    """A table with a number for each pair of members, such as GPUs or ranks.

    Each row and each column belongs to a member. The number in a cell is the value from the row's member to the
    column's member, for example the time of a copy. It is None if there is no number for the pair.
    """

    title: str
    unit: str  # "us", "GB/s"; "Y/N" if the values are 1 or 0
    names: tuple[str, ...]  # names of the rows and of the columns
    values: tuple[tuple[float | None, ...], ...]
    hosts: tuple[str, ...] = ()  # host of each member; () if the title says where the members are

    def __post_init__(self) -> None:
        size = len(self.names)
        if self.hosts and len(self.hosts) != size:
            raise ValueError(f"{self.title}: {size} names need {size} hosts, or none")
        if len(self.values) != size or any(len(row) != size for row in self.values):
            raise ValueError(f"{self.title}: {size} names need {size} rows of {size} numbers each")


@dataclass(frozen=True)
class Gpu:
    """One GPU of a host."""

    index: int  # the driver's number of this GPU
    name: str
    uuid: str
    bus: str  # address on the PCI bus, such as 0000:3b:00.0, in lower case
    memory_bytes: int = 0


@dataclass(frozen=True)
class Links:
    """The measured speed of copies between the GPUs of a host, with peer access "on" and "off".

    ``latency_us["on"][a][b]`` is the value for a copy from GPU a to GPU b, with peer access. None means that this copy
    was not measured. ``gbytes_per_s`` has the same form.
    """

    latency_us: Mapping[str, Sequence[Sequence[float | None]]]  # "on", "off"
    gbytes_per_s: Mapping[str, Sequence[Sequence[float | None]]]  # 10⁹ bytes a second


class GpuFacts(Protocol):
    """An object that returns facts about the GPUs of a host, as the driver reports them."""

    def gpus(self) -> Sequence[Gpu]:
        """Return the GPUs of the host, in the driver's order."""

    def peers(self) -> Sequence[Sequence[bool]]:
        """Return a matrix: ``[a][b]`` is whether GPU a can directly access the memory of GPU b.

        ``[a][a]`` is False.
        """

    def links(self) -> Links | None:
        """Return the measured speed of copies between the GPUs, or None if the speed was not measured."""


@dataclass(frozen=True)
class HostView:
    """The facts about one rank and its host that a check may read."""

    name: str  # name of the host
    environ: Mapping[str, str] = field(default_factory=dict)  # environment of the rank
    distributions: Mapping[str, str] = field(default_factory=dict)  # version by name, in lower case with dashes
    frameworks: Mapping[str, str] = field(default_factory=dict)  # version by name; must be equal on all hosts
    root: str = "/"  # the directory that contains proc, sys and so on
    gpus: GpuFacts | None = None  # None if there is no driver
    rank: int = 0
    local_rank: int = 0
    python: str = ""  # version
    ddl: str = ""  # version of ddlcore
    # By library: its release, and how that is outside of the releases with which the plugins' tests have passed.
    untested: Mapping[str, str] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)  # by plugin: why it refuses a release that is installed

    def path(self, path: str) -> str:
        """Return the path by which a program can open the file ``path`` of this host, such as ``/proc/…``.

        The result is a path below ``root``. ``root`` is "/" for a live host. If this view shows the recorded files of a
        host, ``root`` is the folder with these files.
        """
        return os.path.join(self.root, path.lstrip("/"))

    def read(self, path: str) -> str:
        """Return the text of the file ``path`` (at most 1 MiB), or an empty string if the file cannot be read."""
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as file:
                return file.read(_LARGEST_BYTES)
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in the directory ``path``, or an empty list if the directory cannot be read."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def output(self, program: str, *arguments: str) -> str:
        """Run ``program`` with ``arguments``, and return its standard output.

        The result is empty if the program is not on the rank's PATH, fails, or takes longer than 5 s. If this view
        shows the recorded files of a host (``root`` is not "/"), no program is run, and the result is the content of
        the recorded file ``output/PROGRAM`` below ``root``.
        """
        if self.root != "/":
            return self.read(f"/output/{program}")
        found = shutil.which(program, path=self.environ.get("PATH", os.defpath))
        if found is None:
            return ""
        try:
            done = subprocess.run(
                [found, *arguments],
                capture_output=True,
                text=True,
                timeout=_PATIENCE_S,
                stdin=subprocess.DEVNULL,
                env=dict(self.environ),
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
            return ""
        return done.stdout if done.returncode == 0 else ""


@dataclass(frozen=True)
class Seen:
    """The facts that one check has found on one rank."""

    host: str
    rank: int
    local_rank: int
    facts: Any  # the value that ``Check.look`` returned


class Check(ABC):
    """One subject that ``ddl doctor`` inspects. The class is built without arguments."""

    name: str = ""
    each_rank = False  # True: ``look`` runs on every rank; False: only on the first rank of each host
    completes = (
        ""  # name of another check, whose facts (a dict) are extended by this check's; this check then judges nothing
    )

    @abstractmethod
    def look(self, host: HostView) -> Any:
        """Return the facts about ``host``, as plain data."""

    @abstractmethod
    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """Return the problems that follow from the facts of all ranks; none if there is no problem."""

    def show(self, seen: Sequence[Seen]) -> Iterable[Matrix]:
        """Return tables for the report. The tables are shown even if there is no problem."""
        return ()

    def line(self, seen: Sequence[Seen]) -> str:
        """Return a few words about the facts for the report, or "" if no fact is worth reporting."""
        return ""
