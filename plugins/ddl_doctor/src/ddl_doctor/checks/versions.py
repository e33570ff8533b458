"""Compares the versions of packages on all hosts, and reports versions that are known to be bad."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ddlcore.contracts.check import Check, Finding, HostView, Seen
from ddlcore.contracts.known_bad import KnownBad, KnownBadCheck, installed
from ddlcore.text.installing import pip_install


class VersionsCheck(Check):
    """A check that ddl, Python, the plugins and the frameworks each have the same version on all hosts."""

    name = "versions"

    def look(self, host: HostView) -> Any:
        versions = {"Python": host.python or platform.python_version(), "ddlcore": host.ddl, **host.frameworks}
        return {name: version for name, version in versions.items() if version}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """Yield one finding for each package whose version is not the same on all hosts."""
        for name in sorted({name for one in seen for name in one.facts}):
            hosts: dict[str, list[str]] = {}
            for one in seen:
                hosts.setdefault(one.facts.get(name, "not installed"), []).append(one.host)
            if len(hosts) > 1:
                yield Finding(
                    self.name,
                    f"{name} differs: " + "; ".join(f"{version} on {', '.join(on)}" for version, on in hosts.items()),
                    _meaning(name),
                    _fix(name, hosts),
                )

    def line(self, seen: Sequence[Seen]) -> str:
        facts = seen[0].facts if seen else {}
        return ", ".join(f"{name} {facts[name]}" for name in ("ddlcore", "Python") if name in facts)


def _parted(why: str) -> tuple[str, str]:
    """Return the problem and the command in the text of a plugin, such as "… is installed: pip install 'torch>=2.10'"."""
    found = re.fullmatch(r"(.*?)(?:; run)?: (pip install .*)", why)
    return (found[1], found[2]) if found else (why, "install a release that the plugin works with")


def _meaning(name: str) -> str:
    if name in ("Python", "ddlcore") or name.startswith("ddl-"):
        return "`ddl run` starts nothing on hosts whose ddl or Python is another: ranks must speak the same protocol"
    return "ranks may give tensors other names, orders or values, which shows as a mismatch, a stall or a worse model"


def _fix(name: str, hosts: dict[str, list[str]]) -> str:
    wanted = max((version for version in hosts if version != "not installed"), key=lambda v: len(hosts[v]))
    others = ", ".join(host for version, on in hosts.items() if version != wanted for host in on)
    if name == "Python":
        return f"use Python {wanted} on {others} too, at the same path: one environment on a shared file system will do"
    return f"on {others}: {pip_install(f'{name}=={wanted}', absolute=True)}"


class TestedVersions(Check):
    """A check that the plugins work with the installed releases of their libraries.

    A release that is newer than those with which the plugins were tested is shown. It is no problem by itself.
    """

    name = "tested"

    def look(self, host: HostView) -> Any:
        return {"untested": dict(host.untested), "unusable": dict(host.unusable)}

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """Yield one finding for each plugin that refuses a release on at least one host."""
        hosts: dict[tuple[str, str], list[str]] = {}
        for one in seen:
            for plugin, why in one.facts["unusable"].items():
                hosts.setdefault((plugin, why), []).append(one.host)
        for (plugin, why), on in hosts.items():
            what, fix = _parted(why)
            yield Finding(
                self.name,
                f"{plugin} on {', '.join(on)}: {what}",
                "the plugin cannot be imported, so no rank uses it",
                fix,
            )

    def line(self, seen: Sequence[Seen]) -> str:
        told = dict.fromkeys(f"{name} {how}" for one in seen for name, how in one.facts["untested"].items())
        return ", ".join(told)


class KnownBadVersions(KnownBadCheck):
    """A check that no installed package has a version that is known to be bad.

    ``rows`` are the bad versions that the core knows. Installed plugins add checks for further bad versions.
    """

    name = "known-bad"
    rows = (
        KnownBad(
            "scikit-optimize-np-int",
            installed("scikit-optimize", lambda version: version < (0, 10, 2)),
            "before 0.10.2 it uses numpy.int and parts of scikit-learn that are gone: tuning ends with an AttributeError",
            "pip install 'scikit-optimize>=0.10.2'",
        ),
    )
