"""Compare the reports of all hosts of a job before any rank starts, to find hosts that cannot take part.

This module collects no data about hosts and prints nothing.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlcore.hooks import CommandProvider, DiscoveryProvider, Provider, TransportProvider, WatchProvider
from ddlcore.launch.agents.survey import versions
from ddlcore.launch.agents.wire import Report
from ddlcore.plug.aliases import FRAMEWORKS
from ddlcore.plug.registry import Registry
from ddlcore.text.columns import table
from ddlcore.version import VERSION


@dataclass(frozen=True)
class HostCheck:
    """The result of checking one host."""

    host: str  # the name of the host as the user wrote it
    report: Report | None  # None: the host has sent no report
    problems: tuple[str, ...]  # if there is any problem, no rank is started
    remarks: tuple[str, ...] = ()  # differences that do not stop the job


def compared_packages(registry: Registry) -> dict[str, bool]:
    """Return the names of the packages whose versions are compared between hosts, as the keys of a dict.

    The value is true if the job must not start with different versions of the package. This is the case for ddl's own
    plugins, but not for frameworks, and not for a plugin that only the launching host uses.
    """
    others = {name for names in FRAMEWORKS.values() for name in names}
    used: dict[str, bool] = {}
    for _, provider in registry.offers():
        name = registry.distribution(provider).name
        used[name] = used.get(name, False) or not _only_here(provider)
    return dict.fromkeys(sorted(others), False) | {
        name: used.get(name, True) for name in sorted(registry.distributions())
    }


def _only_here(provider: Provider) -> bool:
    """Return whether only the launching host uses what ``provider`` describes, or a test in one process."""
    if isinstance(provider, TransportProvider):
        return provider.in_process
    return isinstance(provider, (CommandProvider, DiscoveryProvider, WatchProvider))


def judge(host: str, report: Report | None, gone: str, packages: Mapping[str, bool]) -> HostCheck:
    """Compare the report of ``host`` with this host, and return the result.

    If the host has sent no report, ``report`` is None and ``gone`` is the reason, or "" if the reason is not known.
    ``packages`` is the result of ``compared_packages``.
    """
    if report is None:
        return HostCheck(host, None, (gone.removeprefix(f"{host}: ") or "its agent did not answer",))
    problems = list(report.problems)
    remarks: list[str] = []
    if report.python.split(".")[:2] != platform.python_version().split(".")[:2]:
        problems.append(f"Python {report.python} there, {platform.python_version()} here")
    if report.ddl != VERSION:
        problems.append(f"ddlcore {report.ddl} there, {VERSION} here")
    mine = versions(packages)
    for name, stops in packages.items():
        theirs = report.packages.get(name, "")
        if theirs != mine[name]:
            text = f"{name} {theirs or 'not installed'} there, {mine[name] or 'not installed'} here"
            (problems if stops else remarks).append(text)
    return HostCheck(host, report, tuple(problems), tuple(remarks))


def show(checks: Sequence[HostCheck], *, on_terminal: bool, width: int = 100) -> list[str]:
    """Return the lines of a table of all hosts, which shows the problems and remarks of each host.

    The first row of a host shows its first problem or remark, and each further row shows one more. If ``on_terminal``
    is true, the table has colours and is at most ``width`` characters wide.
    """
    rows = []
    for check in checks:
        report = check.report
        words = [*check.problems, *(f"({remark})" for remark in check.remarks)] or ["ok"]
        first = {
            "host": check.host,
            "name": report.host if report else "",
            "python": report.python if report else "",
            "ddlcore": report.ddl if report else "",
            "address": report.address if report else "",
            "state": words[0],
        }
        rows += [first, *({**dict.fromkeys(first, ""), "state": word} for word in words[1:])]
    return _rich_table(rows, width) if on_terminal else table(rows)


def _rich_table(rows: Sequence[Mapping[str, str]], width: int) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        drawn.add_column(name, overflow="fold")
    for row in rows:
        style = "green" if row["state"] == "ok" else "yellow" if row["state"].startswith("(") else "red"
        drawn.add_row(*(Text(value, style if name == "state" else "") for name, value in row.items()))
    console = Console(file=sys.stderr, force_terminal=True, width=width)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().splitlines()
