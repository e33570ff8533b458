"""Compares the versions on all hosts, and holds them against the table of those that are known to be bad."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from typing import Any

from ddlcore.builtin.checks.known import KNOWN_BAD
from ddlcore.contracts.check import Check, Finding, HostView, Seen

__all__ = ["KnownBadCheck", "VersionsCheck"]


class VersionsCheck(Check):
    """ddl, Python, plugins and frameworks are the same everywhere."""

    name = "versions"

    def look(self, host: HostView) -> Any:
        versions = {"Python": host.python or platform.python_version(), "ddlcore": host.ddl, **host.frameworks}
        return {name: version for name, version in versions.items() if version}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """One finding for each thing whose versions differ."""
        for name in sorted({name for one in seen for name in one.facts}):
            hosts: dict[str, list[str]] = {}
            for one in seen:
                hosts.setdefault(one.facts.get(name, "not installed"), []).append(one.host)
            if len(hosts) > 1:
                yield Finding(
                    self.name,
                    f"{name} differs: " + "; ".join(f"{version} on {', '.join(on)}" for version, on in hosts.items()),
                    _meaning(name),
                    _cure(name, hosts),
                )

    def line(self, seen: Sequence[Seen]) -> str:
        facts = seen[0].facts if seen else {}
        return ", ".join(f"{name} {facts[name]}" for name in ("ddlcore", "Python") if name in facts)


def _meaning(name: str) -> str:
    if name in ("Python", "ddlcore") or name.startswith("ddl-"):
        return "`ddl run` starts nothing on hosts whose ddl or Python is another: ranks must speak the same protocol"
    return "ranks may give tensors other names, orders or values, which shows as a mismatch, a stall or a worse model"


def _cure(name: str, hosts: dict[str, list[str]]) -> str:
    wanted = max((version for version in hosts if version != "not installed"), key=lambda v: len(hosts[v]))
    others = ", ".join(host for version, on in hosts.items() if version != wanted for host in on)
    if name == "Python":
        return f"use Python {wanted} on {others} too, at the same path: one environment on a shared file system will do"
    return f"on {others}: pip install {name}=={wanted}"


class KnownBadCheck(Check):
    """Nothing of what is installed is known to be bad."""

    name = "known-bad"

    def look(self, host: HostView) -> Any:
        return {row.name: said for row in KNOWN_BAD if (said := row.found(host))}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """One finding for each row of the table that is met somewhere."""
        for row in KNOWN_BAD:
            hosts = [one for one in seen if row.name in one.facts]
            if hosts:
                what = f"{hosts[0].facts[row.name]} on {', '.join(dict.fromkeys(one.host for one in hosts))}"
                yield Finding(self.name, what, row.means, row.cure)

    def line(self, seen: Sequence[Seen]) -> str:
        return f"none of {len(KNOWN_BAD)}" if not any(one.facts for one in seen) else ""
