"""Store the results of an examination, and format them as text for people or as JSON for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ddl_doctor.sizes import three_digits
from ddlcore.contracts.check import Check, Finding, Matrix, Seen
from ddlcore.text.columns import aligned, indented, padded
from ddlcore.text.numbers import UNKNOWN

_WIDTH = 110
_STATES = {"ok": "green", "found": "red", "not looked at": "yellow"}


@dataclass(frozen=True)
class ReportLine:
    """The result of one check, which the report shows in one line."""

    check: str
    state: str  # "ok", "found", "not looked at"
    words: str = ""


@dataclass
class DoctorReport:
    """The whole report of one examination."""

    title: str
    lines: list[ReportLine] = field(default_factory=list)
    matrices: list[Matrix] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # lines that are shown below the tables

    @property
    def code(self) -> int:
        """The exit code of ``ddl doctor``: 1 if there are findings, otherwise 0."""
        return 1 if self.findings else 0

    def add(self, check: str, findings: Iterable[Finding], words: str = "", matrices: Iterable[Matrix] = ()) -> None:
        """Add the findings of ``check``, and a line that says that the check ran, even if there are no findings.

        ``words`` is the text of that line, and ``matrices`` are tables to show in the report.
        """
        found = list(findings)
        self.lines.append(ReportLine(check, "found" if found else "ok", words))
        self.findings += found
        self.matrices += matrices

    def left_out(self, check: str, why: str) -> None:
        """Add a line that says that ``check`` did not run. ``why`` is the reason, as text."""
        self.lines.append(ReportLine(check, "not looked at", why))

    def as_json(self) -> dict[str, Any]:
        """Return the report in a form that can be written as JSON."""
        return {
            "title": self.title,
            "checks": [asdict(line) for line in self.lines],
            "findings": [asdict(finding) for finding in self.findings],
            "matrices": [asdict(matrix) for matrix in self.matrices],
            "notes": list(self.notes),
        }


def judge(
    report: DoctorReport, checks: Mapping[str, Check], seen: Mapping[str, Sequence[Seen]], why: Mapping[str, str]
) -> None:
    """Let every check judge the facts that it reported, and add the results to the report.

    ``seen`` holds the facts by name of the check. ``why`` holds, by name of the check, the reason why the check
    reported no facts, or none about some of the hosts.
    """
    for name, check in checks.items():
        mine = seen.get(name, ())
        if check.completes:
            if name in why:
                report.left_out(name, why[name])
            continue
        if not mine:
            report.left_out(name, why.get(name, "no host was looked at"))
            continue
        try:
            report.add(name, check.judge(mine), check.line(mine), check.show(mine))
        except Exception as error:  # plugin code may raise anything: the other checks continue
            report.left_out(name, f"it failed ({type(error).__name__}: {error})")
            continue
        if name in why:
            report.left_out(name, why[name])


# --- as text


def text_lines(report: DoctorReport, colour: bool = False) -> list[str]:
    """Return the lines of the whole report in aligned columns. If ``colour`` is true, add colours for a terminal."""
    paint = _paint if colour else _plain
    lines = [report.title, ""]
    cells = padded([(line.check, line.state) for line in report.lines], least=(0, max(map(len, _STATES))))
    for line, (check, state) in zip(report.lines, cells):
        lines.append(f"  {check}  {paint(state, _STATES[line.state])}  {line.words}".rstrip())
    for matrix in report.matrices:
        lines += ["", *indented(matrix_lines(matrix))]
    if report.notes:
        lines += ["", *indented(report.notes)]
    for number, finding in enumerate(report.findings, 1):
        where = f", {finding.where}" if finding.where else ""
        lines += ["", *_wrapped(paint(f"{number}. {finding.check}{where}: {finding.what}", "red"), "   ", "")]
        lines += _wrapped(f"means: {finding.means}", " " * 10, "   ")
        lines += _wrapped(f"fix:   {finding.fix}", " " * 10, "   ")
    count = len(report.findings)
    lines += ["", paint("nothing was found", "green") if not count else f"{count} finding{'' if count == 1 else 's'}"]
    return lines


def matrix_lines(matrix: Matrix) -> list[str]:
    """Return a matrix as lines of text: a heading, and rows with aligned columns."""
    if matrix.unit == "Y/N":
        cells = [[UNKNOWN if value is None else "Y" if value else "N" for value in row] for row in matrix.values]
    else:
        cells = [[UNKNOWN if value is None else figure(value) for value in row] for row in matrix.values]
    width = max(5, *(len(cell) for row in (matrix.names, *cells) for cell in row))  # of each column of values
    title = f"{matrix.title} ({matrix.unit.replace('us', 'µs')}; from the row to the column)"
    if several_hosts(matrix):
        rows = [("", "", *matrix.names)]
        rows += [(name, host, *row) for name, host, row in zip(matrix.names, matrix.hosts, cells)]
        right, least = [0, *range(2, len(rows[0]))], [0, 0, *(width for _ in matrix.names)]
    else:
        rows = [("", *matrix.names), *((name, *row) for name, row in zip(matrix.names, cells))]
        right, least = [*range(len(rows[0]))], [0, *(width for _ in matrix.names)]
    return [title, *aligned(rows, right=right, least=least)]


def several_hosts(matrix: Matrix) -> bool:
    """Return whether the members of ``matrix`` are on different hosts. If so, each row should show its host."""
    return len(set(matrix.hosts)) > 1


def figure(value: float) -> str:
    """Return a value of a matrix, such as a latency, as text with about three digits."""
    return three_digits(value, most_decimals=4)


def _wrapped(text: str, after: str, before: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=before, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
    )


def _plain(text: str, colour: str) -> str:
    return text


def _paint(text: str, colour: str) -> str:
    return f"\x1b[{ {'green': 32, 'red': 31, 'yellow': 33}[colour] }m{text}\x1b[0m"
