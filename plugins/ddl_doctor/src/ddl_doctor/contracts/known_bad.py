"""Tables of components that are known to be bad, and the check that finds such components on a host.

Each row of a table also says what the user should do. Plugins may add their own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ddl_doctor.contracts.check import Check, Finding, HostView, Seen
from ddlcore.contracts.library import version_numbers

__all__ = ["KnownBad", "KnownBadCheck", "installed", "numbers"]


@dataclass(frozen=True)
class KnownBad:
    """One row of a table: a component that is known to be bad, such as a version of a library.

    ``found(host)`` returns a description of the bad component on the host, or "" if the host does not have this
    component. ``means`` is the consequence, and ``fix`` is what the user should do.
    """

    name: str
    found: Callable[[HostView], str]
    means: str
    fix: str


class KnownBadCheck(Check):
    """A check that looks for the bad components in one table. A subclass sets ``name`` and ``rows`` (the table).

    A plugin's subclass also sets ``completes = "known-bad"``, so that the findings of all tables are reported together.
    """

    rows: ClassVar[Sequence[KnownBad]] = ()

    def look(self, host: HostView) -> Any:
        """Return a dict with an entry for each bad component that ``host`` has.

        The key is the name of the row. The value is a list: the description of the component, the consequence, and the
        fix.
        """
        return {row.name: [said, row.means, row.fix] for row in self.rows if (said := row.found(host))}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """Yield one finding for each bad component that at least one host has. The finding names all these hosts."""
        for name in dict.fromkeys(name for one in seen for name in one.facts):
            met = [one for one in seen if name in one.facts]
            said, means, fix = met[0].facts[name]
            where = ", ".join(dict.fromkeys(one.host for one in met))
            yield Finding(self.name, f"{said} on {where}", means, fix)


def numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version as a tuple, so that versions can be compared.

    For example, 2.10.0+cu128 becomes (2, 10, 0).
    """
    return version_numbers(version, 3)


def installed(name: str, bad: Callable[[tuple[int, ...]], bool]) -> Callable[[HostView], str]:
    """Return a function for ``KnownBad.found`` that looks for a bad version of the Python distribution ``name``.

    ``bad`` gets the result of ``numbers`` for the installed version, and returns whether that version is bad.
    """

    def found(host: HostView) -> str:
        version = host.distributions.get(name, "")
        return f"{name} {version}" if version and bad(numbers(version)) else ""

    return found
