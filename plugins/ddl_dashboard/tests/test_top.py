"""`ddl run --top`: what follows from pulses, who is marked, and what is shown with a terminal and without."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ddl_dashboard.rank_statistics import rows_of, table_lines
from ddl_dashboard.top import Top, drawn
from ddl_doctor.reports import Pulse, to_send

from ddlcore.launch.job.watch import RunningRanks, WatchedJob
from ddlcore.launch.output.screen import Screen
from ddlcore.plug.settings import settings_of
from tests.launch.starting import DDL

HOSTS = ("node1", "node1", "node2")


def table(*hosts: str, console: Any = None, **given: Any) -> Top:
    """Return a table of ranks on ``hosts``, on ``console`` or as lines."""
    return Top(WatchedJob(settings_of({})[0], "python train.py", hosts), lambda: console, **given)


def pulses(user_s: float, steps: int = 50, gib: float = 1.0, gpu: float = -1.0) -> tuple[Pulse, Pulse]:
    """Two, ten seconds apart; ``user_s`` of these were waited."""
    held, all_bytes = int(gib * 2**30), 16 << 30 if gpu >= 0 else 0
    return (
        Pulse(100.0, 10, 3.0, 7.0, held, gpu, all_bytes // 2, all_bytes),
        Pulse(110.0, 10 + steps, 3.0 + user_s, 22.0, held, gpu, all_bytes // 2, all_bytes),
    )


def test_what_follows_from_two_pulses() -> None:
    """Step time, share of waiting, cores; a rank that has said nothing yet has a row too."""
    first, second, third = rows_of({0: pulses(2.5), 1: pulses(2.5)[1:]}, HOSTS)
    assert (first.step_s, first.waiting, first.cpu, first.steps) == (0.2, 0.25, 1.5, 60)
    assert (second.step_s, second.waiting, second.steps) == (None, None, 60)
    assert (third.rank, third.host, third.steps) == (2, "node2", 0)


def test_uneven_ranks_are_marked() -> None:
    """All wait for the one that computes longest: it is the one that waits least."""
    rows = rows_of({0: pulses(6.0), 1: pulses(1.0), 2: pulses(6.0, gib=2.0)}, HOSTS)
    assert [row.marks for row in rows] == [(), ("slow: computes 2.2 times as long",), ("large: 2.0 times the memory",)]
    assert [row.marks for row in rows_of({0: pulses(6.0), 1: pulses(5.9), 2: pulses(6.1)}, HOSTS)] == [(), (), ()]
    noise = rows_of({0: pulses(9.9), 1: pulses(9.6), 2: pulses(9.9)}, HOSTS)
    assert [row.marks for row in noise] == [(), (), ()]  # four times as long, but of what hardly counts
    assert rows_of({0: pulses(6.0)}, ("node1",))[0].marks == ()


@pytest.mark.parametrize("step_s", [0.3, 0.4, 1.7, 3.0])
def test_steps_that_take_as_long_as_the_time_between_pulses(step_s: float) -> None:
    """When pulses came makes no rank slow, and no step quicker than it is."""
    top = table("node1", "node1")
    for second in range(45):
        for rank, later_s in ((0, 0.0), (1, 0.3)):
            at_s = second + later_s
            top.heard(rank, to_send(Pulse(at_s, int(at_s / step_s), 0.1 * at_s, at_s, 1 << 30, -1.0, 0, 0)))
        rows = top.rows()
        assert [row.marks for row in rows] == [(), ()]
    assert [row.step_s for row in rows] == pytest.approx([step_s, step_s], rel=0.15)


def test_a_rank_that_says_nothing_any_more_is_marked() -> None:
    """Its figures are of the past: it is called silent, not slow, and nobody is held against it."""
    now_s = 0.0
    top = table("node1", "node1", "node2", clock=lambda: now_s)
    for rank, waited_s in ((0, 6.0), (1, 1.0), (2, 6.0)):
        for pulse in pulses(waited_s):
            top.heard(rank, to_send(pulse))
    slow = ("slow: computes 2.2 times as long",)
    assert [row.marks for row in top.rows()] == [(), slow, ()]
    now_s = 29.0
    assert [row.marks for row in top.rows()][1] == slow, "ten seconds lay between its words"
    for rank in (0, 2):
        top.heard(rank, to_send(msgspec.structs.replace(pulses(6.0)[1], at_s=120.0)))
    now_s = 31.0
    rows = top.rows()
    assert [row.marks for row in rows] == [(), ("silent for 31 s",), ()]
    assert rows[1].steps == 60, "what is known of it stays"


def test_a_rank_that_was_started_again_begins_anew() -> None:
    """The totals of its new process begin at 0: no figure is computed across the two processes."""
    top = table("node1")
    for pulse in pulses(6.0):
        top.heard(0, to_send(pulse))
    top.heard(0, to_send(Pulse(120.0, 0, 0.0, 1.0, 1 << 30)))
    assert [(row.steps, row.step_s, row.cpu) for row in top.rows()] == [(0, None, None)]
    top.heard(0, to_send(Pulse(130.0, 20, 2.0, 6.0, 1 << 30)))
    assert [(row.steps, row.step_s, row.waiting, row.cpu) for row in top.rows()] == [(20, 0.5, 0.2, 0.5)]


def test_ranks_that_join_later_have_rows() -> None:
    """Also those for which there was no place at the start."""
    top = table("node1", "node1")
    for pulse in pulses(6.0):
        top.heard(3, to_send(pulse))
    assert [(row.rank, row.steps) for row in top.rows()] == [(0, 0), (1, 0), (2, 0), (3, 60)]


def test_the_world_of_an_elastic_job_stands_below_the_table() -> None:
    (out, _), (err, shown) = written(), written()
    top = table("node1")
    top.screens((out, err))
    top.begin(RunningRanks(lambda: None, str, lambda: "world 3: 1 rank"))
    for pulse in pulses(6.0):
        top.heard(0, to_send(pulse))
    top.drained()
    assert b"".join(shown).decode().splitlines()[-1] == "ddl run: world 3: 1 rank"
    assert drawn(top.rows(), "world 3: 1 rank").caption == "world 3: 1 rank"


def test_seldom_pulses_are_no_silence() -> None:
    """With --pulse-s 10, ten seconds are nothing."""
    two = {0: pulses(6.0)}  # ten seconds apart
    assert rows_of(two, ("node1",), {0: 29.0})[0].marks == ()
    assert rows_of(two, ("node1",), {0: 30.0})[0].marks == ("silent for 30 s",)
    often = {0: (*pulses(6.0), msgspec.structs.replace(pulses(6.0)[1], at_s=111.0))}
    assert rows_of(often, ("node1",), {0: 4.9})[0].marks == ()
    assert rows_of(often, ("node1",), {0: 5.1})[0].marks == ("silent for 5 s",)


def test_lines() -> None:
    """Aligned; a job without GPUs has no columns for them."""
    lines = table_lines(rows_of({0: pulses(6.0), 1: pulses(1.0)}, HOSTS))
    assert lines[0].split() == ["rank", "host", "steps", "step", "ms", "comm", "cpu", "memory"]
    assert lines[2].split() == [
        "1",
        "node1",
        "60",
        "200.0",
        "10%",
        "150%",
        "1.0",
        "GiB",
        *["slow:", "computes", "2.2", "times", "as", "long"],
    ]
    gpu = table_lines(rows_of({0: pulses(6.0, gpu=0.77)}, ("node1",)))
    assert gpu[1].split()[-6:] == ["77%", "8.0", "GiB", "of", "16.0", "GiB"]


RUNNING = RunningRanks(lambda: None, str, lambda: "")


def written() -> tuple[Screen, list[bytes]]:
    data: list[bytes] = []
    return Screen(data.append), data


def test_on_a_terminal() -> None:
    """A live table; what ranks write comes above it in whole lines; the last state stays."""
    from rich.console import Console

    file = io.StringIO()
    top = table(*HOSTS, console=Console(file=file, force_terminal=True, width=120, color_system="standard"))
    top.screens((written()[0], written()[0]))
    top.begin(RUNNING)
    for rank, waited in ((0, 6.0), (1, 1.0)):
        for pulse in pulses(waited):
            top.heard(rank, to_send(pulse))
    from ddl_dashboard.top import _Above

    writer = _Above(top._console)
    writer.write(b"[0] half a ")
    writer.write(b"line\n[1] an")
    top.drained()
    text = file.getvalue()
    assert "[0] half a line" in text and "[1] an" not in text
    assert "slow: computes 2.2 times as long" in text and "\x1b[1;31m" in text
    assert text.rstrip().splitlines()[-1].split()[:2] == ["2", "node2"]


def test_without_a_terminal() -> None:
    """Plain lines, now and then and at the end; the screens stay what they are."""
    (out, _), (err, shown) = written(), written()
    top = table("node1", plain_s=0.01)
    assert top.screens((out, err)) == (out, err)
    said: list[str] = []
    for pulse in pulses(6.0):
        top.heard(0, to_send(pulse))
    assert top.open(said.append) == ""
    top.begin(RUNNING)
    while not said:
        pass
    top.drained()
    assert said[0].splitlines()[0].startswith("rank  host")
    assert b"".join(shown).decode().splitlines()[1].startswith("ddl run:    0  node1")


SCRIPT = """
import json, numpy as np, ddlcore as ddl, time
ddl.init()
x = np.ones(100)
for _ in range(20):
    ddl.allreduce(x, name="x")
before = ddl.stats()
for _ in range(60):
    time.sleep(0.01)
    ddl.allreduce(x, name="x")
after = ddl.stats()
ddl.barrier()
print(json.dumps({name: after[name] - before[name] for name in ("control_messages", "pulse_messages", "steps")}))
ddl.shutdown()
"""


@pytest.mark.processes
def test_a_job_that_tells_how_it_is(tmp_path: Path) -> None:
    """Pulses are counted apart: a steady step has no control message. The table is on stderr at the end."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [*DDL, "run", "-np", "2", "--top", "--pulse-s", "0.1", "python", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines()]
    assert [one["control_messages"] for one in told] == [0, 0]
    assert all(one["pulse_messages"] >= 3 and one["steps"] == 60 for one in told)
    rows = [line for line in done.stderr.splitlines() if re.match(r"ddl run: +[01]  ", line)]
    assert len(rows) == 2 and all(" MiB" in row for row in rows), done.stderr


def test_top_without_pulses(capsys: pytest.CaptureFixture[str]) -> None:
    """Refused in one line."""
    from ddlcore.commands.cli import main

    assert main(["run", "-np", "2", "--top", "--pulse-s", "0", "true"]) == 2
    assert "--pulse-s must be above 0" in capsys.readouterr().err
