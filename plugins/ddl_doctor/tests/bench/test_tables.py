"""Columns stand under each other, whatever came out."""

from __future__ import annotations

import re

from ddl_doctor.bench.plan import BenchPlan
from ddl_doctor.bench.results import TRANSPORT, WHOLE, MeasuredRow
from ddl_doctor.bench.tables import closing, heading, line, ranks_and_hosts

PLAN = BenchPlan(("allreduce",), (4, 1 << 26), "float32", 3, ("pigeon", "snail"))
QUICK = MeasuredRow(
    "allreduce", 4, {TRANSPORT: [1e-6] * 3, WHOLE: [5e-5] * 3, "pigeon": [2e-4] * 3, "snail": [1e-3] * 3}, replayed=1.0
)
SLOW = MeasuredRow("allreduce", 1 << 26, {TRANSPORT: [7e-3] * 3, WHOLE: [0.1] * 3, "pigeon": [2.0] * 3}, replayed=0.5)


def columns(text: str) -> list[int]:
    """Where cells that are flush right end: at the last digit or letter before two spaces."""
    return [found.end() for found in re.finditer(r"\S(?=  |$)", text)]


def test_rows_stand_under_their_heading() -> None:
    """The numbers of the first five columns end where the words above them do."""
    head = heading("allreduce", PLAN, ranks_and_hosts(2, 1), "shm")
    assert head[1] == "allreduce, 2 ranks, float32"
    rows = [line(row, PLAN.peers) for row in (QUICK, SLOW)]
    assert [row[:8] for row in rows] == ["     4 B", "  64 MiB"]
    for row in rows:
        for word in ("shm µs", "ddl µs", "pigeon µs"):
            end = head[2].index(word) + len(word)
            assert row[end - 1].isdigit() and row[end : end + 1] in (" ", "")
        for word in ("pigeon/shm", "pigeon/ddl", "snail/shm"):
            at = head[2].index(word)
            assert row[at - 1] == " " and row[at] != " "


def test_hosts_stand_in_the_heading() -> None:
    """If there are several of them."""
    assert heading("allreduce", PLAN, ranks_and_hosts(8, 2), "gloo")[1] == "allreduce, 8 ranks on 2 hosts, float32"


def test_values() -> None:
    """Microseconds, GB/s, and ratios with their interval."""
    assert line(QUICK, PLAN.peers).split("  ")[-1] == "20.0 [20.0, 20.0]"
    words = line(QUICK, PLAN.peers).split()
    assert words[:6] == ["4", "B", "1.0", "0.00", "50.0", "0.00"]
    assert "200 [200, 200]" in line(QUICK, PLAN.peers)
    assert line(SLOW, PLAN.peers).split()[2:6] == ["7000.0", "9.59", "100000.0", "0.67"]


def test_what_was_not_measured_is_a_dash() -> None:
    """And said below the table."""
    assert line(SLOW, PLAN.peers).split()[-3:] == ["–", "–", "–"]
    assert "snail has no allreduce of float32." in closing([QUICK, SLOW], PLAN, "shm")


def test_closing_says_what_was_replayed() -> None:
    """All, some or none of the whole calls."""
    assert not any("memory" in text for text in closing([QUICK], PLAN, "shm"))
    assert any(text.startswith("75% of the whole calls ran from memory") for text in closing([QUICK, SLOW], PLAN, "s"))
    none = MeasuredRow("allreduce", 4, QUICK.times)
    assert any(text.startswith("Every whole call was negotiated") for text in closing([none], PLAN, "shm"))
