"""Judge, before any rank starts, whether the hosts of a job fit together. Collects no facts and prints nothing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlcore.job import VERSION
from ddlcore.launch.agents.survey import versions
from ddlcore.launch.agents.wire import Report
from ddlcore.plug.aliases import FRAMEWORKS
from ddlcore.plug.registry import Registry
from ddlcore.text.columns import table


@dataclass(frozen=True)
class HostCheck:
    """The result of checking one host."""

    host: str  # as the user wrote it
    report: Report | None
    problems: tuple[str, ...]  # if there is one, nothing is started
    remarks: tuple[str, ...] = ()  # differences that do not stop the job


def compared_packages(registry: Registry) -> dict[str, bool]:
    """Return a dict whose keys are the names of the distributions that are compared between hosts.

    A value is true if a different version stops the job. That is so for ddl's own plugins, but not for frameworks.
    """
    ours = registry.distributions()
    others = {name for names in FRAMEWORKS.values() for name in names}
    return dict.fromkeys(sorted(others), False) | dict.fromkeys(sorted(ours), True)


def judge(host: str, report: Report | None, gone: str, packages: Mapping[str, bool]) -> HostCheck:
    """Compare the report of ``host`` with this host, and return the result.

    ``report`` is None if the host has sent none; ``gone`` then says why. ``packages`` has the form that
    ``compared_packages`` returns.
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
    """Return the lines of a table. Each host has a row with its first problem, and one more row for each other problem.

    ``on_terminal`` adds colours.
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
