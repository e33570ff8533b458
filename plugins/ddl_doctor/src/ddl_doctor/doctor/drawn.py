"""Print the report on a terminal with the package rich, as tables. The colour of a cell shows how good the value is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddl_doctor.doctor.report import DoctorReport, figure, several_hosts
from ddlcore.contracts.check import Matrix
from ddlcore.text.numbers import UNKNOWN

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {"ok": "green", "found": "bold red", "not looked at": "yellow"}
_SHADES = ("green", "yellow", "red")  # from good to bad


def print_report(report: DoctorReport, console: Any = None) -> None:
    """Print the report to standard output, or to ``console`` (a ``rich.console.Console``) if given."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    console.print(Text(report.title, "bold"))
    lines = Table(box=None, pad_edge=True, show_header=False)
    for line in report.lines:
        lines.add_row(Text(line.check), Text(line.state, _STYLES[line.state]), Text(line.words))
    console.print(lines)
    for matrix in report.matrices:
        unit = "µs" if matrix.unit == "us" else matrix.unit
        console.print(Text(f"\n{matrix.title} ({unit}; from the row to the column)", "bold"))
        console.print(_table(matrix))
    if report.notes:
        console.print(Text("\n" + "\n".join(report.notes)))
    for number, finding in enumerate(report.findings, 1):
        where = f", {finding.where}" if finding.where else ""
        console.print(Text(f"\n{number}. {finding.check}{where}: {finding.what}", "bold red"))
        words = Table(box=None, show_header=False, padding=(0, 1, 0, 3))
        words.add_row(Text("means", "dim"), Text(finding.means))
        words.add_row(Text("fix", "green"), Text(finding.fix))
        console.print(words)
    count = len(report.findings)
    last = f"{count} finding{'' if count == 1 else 's'}" if count else "nothing was found"
    console.print(Text(last, "bold red" if count else "bold green"))


def _table(matrix: Matrix) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=True)
    drawn.add_column("")
    with_hosts = several_hosts(matrix)
    if with_hosts:
        drawn.add_column("")
    for name in matrix.names:
        drawn.add_column(Text(name), justify="right")
    for place, (name, row) in enumerate(zip(matrix.names, matrix.values)):
        host = [Text(matrix.hosts[place])] if with_hosts else []
        drawn.add_row(Text(name), *host, *(Text(_word(value, matrix.unit), _shade(value, matrix)) for value in row))
    return drawn


def _word(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    return ("Y" if value else "N") if unit == "Y/N" else figure(value)


def _shade(value: float | None, matrix: Matrix) -> str:
    known = sorted(one for row in matrix.values for one in row if one is not None)
    if value is None or not known:
        return "dim"
    if matrix.unit == "Y/N":
        return "green" if value else "red"
    times = value / known[0] if matrix.unit == "us" else known[-1] / value if value else 99.0
    return _SHADES[(times > 2) + (times > 5)]
