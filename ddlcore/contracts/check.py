"""The check contract: what ``ddl doctor`` inspects on every host, and what it reports when something is wrong.

The rules:

* ``look`` runs on the inspected host and returns facts. ``judge`` and ``show`` run on the user's host and get the facts
  of all hosts. Facts are plain data that JSON can represent, so facts that were recorded on one machine can be judged
  on another.
* A check changes nothing and never raises an exception. If it cannot read something, it leaves that fact out.
* A check reads its surroundings only from its ``HostView``: files below a root that tests can choose, the environment,
  the installed distributions, the GPUs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Check", "Finding", "Gpu", "Gpus", "HostView", "Links", "Matrix", "Seen"]

_PATIENCE_S = 5.0  # timeout for a program that prints its version
_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One thing that a check has found to be wrong or slow."""

    check: str  # the name of the check that found it
    what: str  # one line: the problem, and where it is
    means: str  # its consequence
    fix: str  # what to do; a command line if there is one
    where: str = ""  # the host or rank; "" means everywhere


@dataclass(frozen=True)
class Matrix:
    """A table of numbers for pairs: from the member of the row to the member of the column.

    A value is None if there is no number for the pair.
    """

    title: str
    unit: str  # "us", "GB/s"; "Y/N" if the values are 1 or 0
    names: tuple[str, ...]  # names of the rows and of the columns
    values: tuple[tuple[float | None, ...], ...]
    hosts: tuple[str, ...] = ()  # host of each member; () if the title says where they are

    def __post_init__(self) -> None:
        size = len(self.names)
        if self.hosts and len(self.hosts) != size:
            raise ValueError(f"{self.title}: {size} names need {size} hosts, or none")
        if len(self.values) != size or any(len(row) != size for row in self.values):
            raise ValueError(f"{self.title}: {size} names need {size} rows of {size} numbers each")


@dataclass(frozen=True)
class Gpu:
    """One GPU of a host."""

    index: int  # number by which the driver knows it
    name: str
    uuid: str
    bus: str  # address on the PCI bus, such as 0000:3b:00.0, in lower case
    memory_bytes: int = 0


@dataclass(frozen=True)
class Links:
    """The measured speed of copies between the GPUs of a host, with peer access "on" and "off".

    The first index of a matrix is the GPU from which bytes are copied, the second the GPU to which they are copied.
    """

    latency_us: Mapping[str, Sequence[Sequence[float | None]]]  # "on", "off"
    gbytes_per_s: Mapping[str, Sequence[Sequence[float | None]]]  # 10⁹ bytes a second


class Gpus(Protocol):
    """An object that answers questions about the GPUs of a host, as the driver does."""

    def gpus(self) -> Sequence[Gpu]:
        """Return the GPUs in the driver's order."""

    def peers(self) -> Sequence[Sequence[bool]]:
        """Return for each pair whether the GPU of the row can access the memory of the GPU of the column directly.

        The value for a GPU and itself is False.
        """

    def links(self) -> Links | None:
        """Return the measured copies; None if they were not measured."""


@dataclass(frozen=True)
class HostView:
    """The facts about one rank and its host that a check may read."""

    name: str  # name of the host
    environ: Mapping[str, str] = field(default_factory=dict)  # environment of the rank
    distributions: Mapping[str, str] = field(default_factory=dict)  # version by name, in lower case with dashes
    frameworks: Mapping[str, str] = field(default_factory=dict)  # version by name; must be equal on all hosts
    root: str = "/"  # the directory that holds proc, sys and so on
    gpus: Gpus | None = None  # None if there is no driver
    rank: int = 0
    local_rank: int = 0
    python: str = ""  # version
    ddl: str = ""  # version of ddlcore

    def path(self, path: str) -> str:
        """Return the path under which the file ``path`` of this host, such as ``/proc/…``, can be opened.

        It is a path below ``root``, which differs from ``/`` if the host was only recorded.
        """
        return os.path.join(self.root, path.lstrip("/"))

    def read(self, path: str) -> str:
        """Return the text of the file ``path``, or an empty string if it cannot be read."""
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as file:
                return file.read(_LARGEST_BYTES)
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in the directory ``path``, or an empty list if it does not exist."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def output(self, program: str, *arguments: str) -> str:
        """Return the standard output of ``program``, called with ``arguments``.

        It is empty if the program is not on the rank's PATH, fails, or takes longer than 5 s. If this host was only
        recorded, return the content of the file ``output/PROGRAM`` below its root.
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
    facts: Any  # what ``Check.look`` returned


class Check(ABC):
    """One subject that ``ddl doctor`` inspects. It is built without arguments."""

    name: str = ""
    each_rank = False  # True: it runs on every rank; False: on the first rank of each host
    completes = (
        ""  # name of another check, whose facts (a dict) are extended by this check's; this check then judges nothing
    )

    @abstractmethod
    def look(self, host: HostView) -> Any:
        """Return the facts about ``host``, as plain data."""

    @abstractmethod
    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """Return findings from the facts of all ranks; none if everything is in order."""

    def show(self, seen: Sequence[Seen]) -> Iterable[Matrix]:
        """Return tables for the report. They are shown even if nothing is wrong."""
        return ()

    def line(self, seen: Sequence[Seen]) -> str:
        """Return a few words about the facts for the report. Empty if there is nothing worth reporting."""
        return ""
