"""The functions through which the loss of a rank goes are those that the documentation names, in its order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.architecture.source import ROOT

TRACED = Path(__file__).with_name("traced")
PAGE = ROOT / "docs" / "design" / "architecture.md"
ROW = re.compile(
    r" (?P<what>.{19}) (?P<role>launcher|rank    |newcomer| {8})  (?P<file>\S+\.py) +(?P<functions>[^:]+)(:.*)?"
)


class Station(NamedTuple):
    role: str
    file: str
    function: str


class Call(NamedTuple):
    at_s: float
    station: Station


def ways() -> list[list[Station]]:
    """Return the stations of each way on the page."""
    section = PAGE.read_text().partition("## The way of a lost rank")[2].partition("\n## ")[0]
    return [list(_stations(block)) for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL)]


def _stations(block: str) -> Iterator[Station]:
    role = ""
    for line in block.splitlines():
        row = ROW.fullmatch(line)
        assert row is not None, f"not understood: {line!r}"
        role = row["role"].strip() or role
        for name in row["functions"].split(","):
            yield Station(role, row["file"], name.strip().rpartition(".")[2])


def calls(directory: Path, roles: dict[int, str]) -> list[Call]:
    """Return what the processes have noted, in the order of the moments."""
    found = []
    for pid, role in roles.items():
        for line in (directory / str(pid)).read_text().splitlines():
            at_s, file, function = line.split()
            found.append(Call(float(at_s), Station(role, file, function)))
    return sorted(found)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_lost_rank_goes_the_way_that_is_written_down(tmp_path: Path) -> None:
    assert [len(way) > 15 for way in ways()] == [True, True]
    path = os.pathsep.join(filter(None, [str(TRACED), str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "WAY_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2", "--min-np", "1", sys.executable]
    launcher = subprocess.Popen(
        [*command, str(TRACED / "train.py")], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = launcher.communicate(timeout=150)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, output
    (rank,) = {file.suffix for file in tmp_path.glob("rank0.*")} - {file.suffix for file in tmp_path.glob("rank1.*")}
    both = sorted(tmp_path.glob("rank1.*"), key=lambda file: file.stat().st_mtime)
    newcomer = both[-1].suffix
    assert len(both) == 2, output
    noted = calls(tmp_path, {launcher.pid: "launcher", int(rank[1:]): "rank", int(newcomer[1:]): "newcomer"})
    for way in ways():
        at = 0
        for station in way:
            later = (number for number in range(at, len(noted)) if noted[number].station == station)
            found = next(later, -1)
            assert found >= 0, f"{station} does not come, or comes too early; {_context(noted, at, station)}"
            at = found


def _context(noted: list[Call], at: int, station: Station) -> str:
    """Return a text with the moments at which ``station`` was reached, and with the calls from index ``at`` on."""
    moments = [f"{call.at_s:.6f}" for call in noted if call.station == station]
    after = "\n".join(f"{call.at_s:.6f} {call.station}" for call in noted[at : at + 60])
    return f"it came at {', '.join(moments) or 'no time'}, and from the station before it on:\n{after}"
