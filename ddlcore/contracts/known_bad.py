"""What is known to be bad, with its fix: rows, and the check that finds them, which plugins have for what they build on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ddlcore.contracts.check import Check, Finding, HostView, Seen

__all__ = ["KnownBad", "KnownBadCheck", "installed", "numbers"]


@dataclass(frozen=True)
class KnownBad:
    """One row. ``found`` says what of it is on a host, "" where it is not."""

    name: str
    found: Callable[[HostView], str]
    means: str
    fix: str


class KnownBadCheck(Check):
    """To set: ``name`` and ``rows``; and, in a plugin, ``completes = "known-bad"``, so that all rows are told together."""

    rows: ClassVar[Sequence[KnownBad]] = ()

    def look(self, host: HostView) -> Any:
        """By name of the row: what was found, what it means, and the fix."""
        return {row.name: [said, row.means, row.fix] for row in self.rows if (said := row.found(host))}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """One finding for each row that is met somewhere, its hosts in one line."""
        for name in dict.fromkeys(name for one in seen for name in one.facts):
            met = [one for one in seen if name in one.facts]
            said, means, fix = met[0].facts[name]
            where = ", ".join(dict.fromkeys(one.host for one in met))
            yield Finding(self.name, f"{said} on {where}", means, fix)


def numbers(version: str) -> tuple[int, ...]:
    """The first three of a version, to compare: 2.10.0+cu128 is (2, 10, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def installed(name: str, bad: Callable[[tuple[int, ...]], bool]) -> Callable[[HostView], str]:
    """For ``KnownBad.found``: distribution ``name`` is there, in a version whose ``numbers`` are bad."""

    def found(host: HostView) -> str:
        version = host.distributions.get(name, "")
        return f"{name} {version}" if version and bad(numbers(version)) else ""

    return found
