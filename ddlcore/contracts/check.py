"""The check contract: what `ddl doctor` inspects on every host, and what it reports when something is wrong.

The rules:

* ``look`` runs on the inspected host; ``judge`` and ``show`` run where the user is. Facts travel between them: plain
  data that JSON can hold. So facts that were recorded on one machine can be judged on another.
* A check changes nothing. If it cannot read something, that fact is missing; it never raises an exception.
* A check gets everything about its surroundings from its ``HostView``: files below a root that tests can choose, the
  environment, the installed distributions, the GPUs.
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
    """Something that is wrong, or that will be slow."""

    check: str  # the name of the check that found it
    what: str  # one line: the problem, and where it is
    means: str  # its consequence
    fix: str  # what to do; a command line if there is one
    where: str = ""  # the host or rank; "" means everywhere


@dataclass(frozen=True)
class Matrix:
    """A table of numbers between pairs, from the row's member to the column's; None if a pair has no number."""

    title: str
    unit: str  # "us", "GB/s"; "Y/N" if the values are 1 or 0
    names: tuple[str, ...]  # of rows and columns
    values: tuple[tuple[float | None, ...], ...]

    def __post_init__(self) -> None:
        size = len(self.names)
        if len(self.values) != size or any(len(row) != size for row in self.values):
            raise ValueError(f"{self.title}: {size} names need {size} rows of {size} numbers each")


@dataclass(frozen=True)
class Gpu:
    """One GPU of a host."""

    index: int  # as the driver numbers them
    name: str
    uuid: str
    bus: str  # address on the PCI bus, such as 0000:3b:00.0, in lower case
    memory_bytes: int = 0


@dataclass(frozen=True)
class Links:
    """Measured copies between the GPUs of a host, as [from][to], with peer access on and off."""

    latency_us: Mapping[str, Sequence[Sequence[float | None]]]  # "on", "off"
    gbytes_per_s: Mapping[str, Sequence[Sequence[float | None]]]  # 10⁹ bytes a second


class Gpus(Protocol):
    """The information that the driver of a host's GPUs gives."""

    def gpus(self) -> Sequence[Gpu]:
        """Return the GPUs in the driver's order."""

    def peers(self) -> Sequence[Sequence[bool]]:
        """Return for each pair whether the row's GPU can access the column's memory directly.

        It is False for a GPU and itself.
        """

    def links(self) -> Links | None:
        """Return the measured copies; None if nobody has measured them."""


@dataclass(frozen=True)
class HostView:
    """The part of one rank's host that a check may look at."""

    name: str  # of the host
    environ: Mapping[str, str] = field(default_factory=dict)  # of the rank
    distributions: Mapping[str, str] = field(default_factory=dict)  # version by name, in lower case with dashes
    frameworks: Mapping[str, str] = field(default_factory=dict)  # those that must be the same on all hosts
    root: str = "/"  # the directory that holds proc, sys and so on
    gpus: Gpus | None = None  # None if there is no driver
    rank: int = 0
    local_rank: int = 0
    python: str = ""  # version
    ddl: str = ""  # version of ddlcore

    def path(self, path: str) -> str:
        """Return where a path of this host such as ``/proc/…`` lies below the root."""
        return os.path.join(self.root, path.lstrip("/"))

    def read(self, path: str) -> str:
        """Return the text of a file; "" if it cannot be read."""
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as file:
                return file.read(_LARGEST_BYTES)
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory; [] if it does not exist."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def output(self, program: str, *arguments: str) -> str:
        """Return what a program prints to stdout; "" if it is not on the rank's PATH, fails, or takes longer than 5 s.

        For a host that was only recorded, return the content of the file ``output/PROGRAM`` below its root.
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
    """The facts that one check found in one place."""

    host: str
    rank: int
    local_rank: int
    facts: Any  # what ``Check.look`` returned


class Check(ABC):
    """One subject that `ddl doctor` inspects. It is constructed without arguments."""

    name: str = ""
    each_rank = False  # runs on every rank; else on the first rank of each host
    completes = (
        ""  # name of another check, whose facts (a dict) are extended by this check's; this check then judges nothing
    )

    @abstractmethod
    def look(self, host: HostView) -> Any:
        """Return the facts."""

    @abstractmethod
    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """Return findings from the facts of all places; none if everything is in order."""

    def show(self, seen: Sequence[Seen]) -> Iterable[Matrix]:
        """Return tables that belong in every report."""
        return ()

    def line(self, seen: Sequence[Seen]) -> str:
        """Return a few words on the facts for the report; "" if they are not worth a line."""
        return ""
