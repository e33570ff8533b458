"""The check contract: what `ddl doctor` looks at on every host, and what it says when something is wrong.

The rules, said once:

* ``look`` runs on the host that is looked at, ``judge`` and ``show`` where the user is. Between them go
  facts: plain data, as JSON carries it. So what was recorded on one machine can be judged on another.
* A check changes nothing. What it cannot read is a fact that is missing, never an exception.
* All that a check wants to know of its surroundings it asks its ``HostView``: files below a root that tests
  may choose, an environment, installed distributions, GPUs.
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

_PATIENCE_S = 5.0  # for a program that tells its version
_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Finding:
    """Something that is wrong or will be slow."""

    check: str  # the name of the check that found it
    what: str  # one line: what is so, and where
    means: str  # what follows from it
    fix: str  # what to do, as a line to type where there is one
    where: str = ""  # the host or rank; empty: everywhere


@dataclass(frozen=True)
class Matrix:
    """Numbers between pairs, from the row to the column; None where there is none."""

    title: str
    unit: str  # "us", "GB/s"; "Y/N" for those that are 1 or 0
    names: tuple[str, ...]  # of rows and columns
    values: tuple[tuple[float | None, ...], ...]

    def __post_init__(self) -> None:
        size = len(self.names)
        if len(self.values) != size or any(len(row) != size for row in self.values):
            raise ValueError(f"{self.title}: {size} names need {size} rows of as many numbers")


@dataclass(frozen=True)
class Gpu:
    """One GPU of a host."""

    index: int  # as the driver counts
    name: str
    uuid: str
    bus: str  # address on the PCI bus, such as 0000:3b:00.0, in lower case
    memory_bytes: int = 0


@dataclass(frozen=True)
class Links:
    """Copies between the GPUs of a host as they were measured; [from][to], with peer access on and off."""

    latency_us: Mapping[str, Sequence[Sequence[float | None]]]  # "on", "off"
    gbytes_per_s: Mapping[str, Sequence[Sequence[float | None]]]  # 10⁹ bytes a second


class Gpus(Protocol):
    """What the driver of a host's GPUs tells."""

    def gpus(self) -> Sequence[Gpu]:
        """In the driver's order."""

    def peers(self) -> Sequence[Sequence[bool]]:
        """Whether the GPU of the row reaches the memory of the column's directly; itself it does not."""

    def links(self) -> Links | None:
        """None where nobody has measured."""


@dataclass(frozen=True)
class HostView:
    """One rank's host, as far as a check may look."""

    name: str  # of the host
    environ: Mapping[str, str] = field(default_factory=dict)  # of the rank
    distributions: Mapping[str, str] = field(default_factory=dict)  # version by name, in lower case with dashes
    frameworks: Mapping[str, str] = field(default_factory=dict)  # of these, what hosts must have alike
    root: str = "/"  # below it lie proc, sys and the rest
    gpus: Gpus | None = None  # None: no driver
    rank: int = 0
    local_rank: int = 0
    python: str = ""  # version
    ddl: str = ""  # version of ddlcore

    def path(self, path: str) -> str:
        """Where ``/proc/…`` or the like of this host lies."""
        return os.path.join(self.root, path.lstrip("/"))

    def read(self, path: str) -> str:
        """The text of a file; "" where it cannot be read."""
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as file:
                return file.read(_LARGEST_BYTES)
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; [] where there is none."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def output(self, program: str, *arguments: str) -> str:
        """What a program says. "" where it is not on the rank's PATH, fails, or takes too long.

        Of a host that was only recorded: the file ``output/PROGRAM`` below its root.
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
    """What one check saw in one place."""

    host: str
    rank: int
    local_rank: int
    facts: Any  # as ``Check.look`` gave them


class Check(ABC):
    """One thing that is looked at. Built without arguments."""

    name: str = ""
    each_rank = False  # looks on every rank; else on the first of each host
    completes = (
        ""  # name of another check, whose facts (a dict) get the keys of this one's; then this one judges nothing
    )

    @abstractmethod
    def look(self, host: HostView) -> Any:
        """Facts."""

    @abstractmethod
    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """Findings, from the facts of all places; none where all is well."""

    def show(self, seen: Sequence[Seen]) -> Iterable[Matrix]:
        """Tables that belong into the report in any case."""
        return ()

    def line(self, seen: Sequence[Seen]) -> str:
        """What is so, in a few words, for the report; "" for nothing worth a line."""
        return ""
