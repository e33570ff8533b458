"""A stall: who is waited for and what it is doing, the end of a job that stalls for too long, and what is left in files."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.errors import DeadlineExceeded
from ddlcore.job import Job
from ddlcore.messages import Ask, Planned, Request, Show, Spec, Stack, Stalled, Standing, encode
from ddlcore.observe.flight import Flight
from ddlcore.runtime.coordinator import Coordinator
from ddlcore.runtime.stall import ANSWER_S, Patience, StallWatch
from ddlcore.testing import World
from ddlcore.types import Kind

pytestmark = pytest.mark.timeout(270)

SPEC = encode(Spec(Kind.ALLREDUCE, shape=(2,)))


class NoFusion(FusionPolicy):
    """Each by itself."""

    def arrange(self, ready: Any, params: Any) -> list[list[int]]:
        return [[i] for i in range(len(ready))]


def watch(**patience: Any) -> tuple[Coordinator, StallWatch]:
    """Three ranks, the first two of which have asked for one tensor."""
    coordinator = Coordinator(3, NoFusion(), 0)
    for rank in range(2):
        coordinator.handle(rank, Request(0, 1, (Ask(0, "allreduce.late", SPEC),)))
    one = StallWatch(coordinator, Patience(**patience))
    assert one.look(0.0) == ([], [])
    return coordinator, one


def test_the_missing_rank_is_asked_for_its_stack_once_and_only_if_wanted() -> None:
    """When the stall is reported; what it says follows."""
    _, plain = watch(warning_s=10.0)
    assert plain.look(10.0)[1] == []
    _, one = watch(warning_s=10.0, stacks=True)
    texts, told = one.look(10.0)
    assert texts[0].splitlines()[:3] == [
        "stalled for more than 10 s in discovery:",
        "  tensor          ready on  missing ranks  waits s",
        "  allreduce.late  0-1       2                 10.0",
    ]
    assert told == [(2, Show())]
    assert one.look(11.0) == ([], [])
    one.hear(2, Stack("  File train.py, line 3\n"))
    assert one.look(11.5) == (["rank 2 is here:\n  File train.py, line 3"], [])
    assert one.look(60.0) == ([], [])


def test_a_rank_that_does_not_answer_is_said_to_be_stopped() -> None:
    """After a while; a stack that nobody asked for says nothing."""
    _, one = watch(warning_s=10.0, stacks=True)
    one.hear(2, Stack("unasked"))
    one.look(10.0)
    assert one.look(10.0 + ANSWER_S / 2) == ([], [])
    (text,), _ = one.look(10.0 + ANSWER_S)
    assert "no word from rank 2" in text


def test_ranks_that_stand_at_the_same_line_are_told_together() -> None:
    """Of a thousand ranks the report stays short."""
    coordinator = Coordinator(9, NoFusion(), 0)
    coordinator.handle(0, Request(0, 1, (Ask(0, "allreduce.late", SPEC),)))
    one = StallWatch(coordinator, Patience(warning_s=10.0, stacks=True))
    one.look(0.0)
    (table,), told = one.look(10.0)
    assert "allreduce.late  0         1-8" in table
    assert [rank for rank, _ in told] == list(range(1, 9))
    for rank in range(1, 7):
        one.hear(rank, Stack("  here" if rank != 4 else "  there"))
    assert one.look(11.0)[0] == ["ranks 1-3,5-6 are here:\n  here", "rank 4 is here:\n  there"]
    (text,), _ = one.look(10.0 + ANSWER_S)
    assert "no word from ranks 7-8" in text


def test_a_stall_in_discovery_ends_the_job_after_its_time() -> None:
    """Every rank is told, once, what waited for whom; also where stalls are not reported."""
    _, one = watch(warning_s=0.0, shutdown_s=30.0)
    assert one.look(29.0) == ([], [])
    texts, told = one.look(30.0)
    assert texts == []
    assert [rank for rank, _ in told] == [0, 1, 2]
    message = told[0][1]
    assert isinstance(message, Stalled)
    assert message.text.startswith("stalled for more than 30 s (DDL_STALL_SHUTDOWN_S)")
    assert "'allreduce.late' is ready on ranks 0-1, but not on rank 2" in message.text
    assert one.look(31.0) == ([], [])


def test_a_stall_of_an_older_epoch_ends_nothing() -> None:
    """The rank has moved since it said so."""
    _, one = watch(shutdown_s=30.0)
    assert one.over(Standing(7, 1, True, 0, ("a",), alarm=True, over=True)) == []
    assert [rank for rank, _ in one.over(Standing(0, 1, True, 0, ("a",), alarm=True, over=True))] == [0, 1, 2]


# --- worlds


def sleep_where_it_can_be_seen(until: threading.Event) -> None:
    """What the late rank is doing, always in one line."""
    until.wait(120.0)


def late_in_step(late_step: int, until: threading.Event) -> Callable[[int, Job], None]:
    """A loop of thirty steps, in one of which rank 1 sleeps."""

    def program(rank: int, job: Job) -> None:
        for step in range(30):
            if rank == 1 and step == late_step:
                sleep_where_it_can_be_seen(until)
            ddl.allreduce(np.full(4, step, np.float64), name="grads", op=ddl.Sum)

    return program


@pytest.mark.parametrize(("step", "phase"), [(0, "in discovery"), (20, "in replay")])
def test_the_report_has_the_python_stack_of_the_rank_that_sleeps(
    step: int, phase: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The table first, then the lines of its own code; the job goes on."""
    seen = ""
    reported = threading.Event()

    def listen() -> None:
        nonlocal seen
        deadline_s = time.monotonic() + 120.0
        while "is here" not in seen and time.monotonic() < deadline_s:
            time.sleep(0.02)
            seen += capfd.readouterr().err
        reported.set()

    listener = threading.Thread(target=listen)
    listener.start()
    with World(3, settings={"stall_warning_s": 0.2, "stall_stacks": True}) as world:
        world.run(late_in_step(step, reported))
    listener.join()
    head, columns, row = seen.partition("stalled for more than 0.2 s ")[2].splitlines()[:3]
    assert head.startswith(phase), seen
    assert columns.split("  ")[1] == "tensor" and columns.split()[-2:] == ["waits", "s"]
    assert row.split()[:3] == ["allreduce.grads", "0,2", "1"] and float(row.split()[3]) >= 0.2
    told = seen.partition("rank 1 is here:\n")[2]
    assert "in sleep_where_it_can_be_seen" in told and "until.wait(120.0)" in told
    assert "in program" in told, "the call before it, too"


@pytest.mark.parametrize("step", [0, 20])
def test_a_stall_ends_the_job_on_every_rank_by_name(
    step: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """DeadlineExceeded, with tensor, ranks and setting; the one that was late gets it when it comes. Files say what was under way."""
    errors: dict[int, DeadlineExceeded] = {}
    written = threading.Event()

    def left_of(rank: int) -> Path:
        return tmp_path / f"rank{rank}.error.json"

    def program(rank: int, job: Job) -> None:
        try:
            late_in_step(step, written)(rank, job)
        except DeadlineExceeded as error:
            errors[rank] = error
        if rank == 0:  # the late one sleeps until every rank has written where it was
            deadline_s = time.monotonic() + 40.0
            while not all(left_of(one).exists() for one in range(3)) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            written.set()

    settings = {"stall_warning_s": 0.2, "stall_shutdown_s": 1.0, "flight_dir": str(tmp_path)}
    with World(3, settings=settings) as world:
        world.run(program)
    assert sorted(errors) == [0, 1, 2]
    for error in errors.values():
        assert "stalled for more than 1 s (DDL_STALL_SHUTDOWN_S), the job ends" in str(error)
        assert "'allreduce.grads'" in str(error) and "rank 1" in str(error)
    for rank in range(3):
        left = json.loads(left_of(rank).read_text())
        assert (left["rank"], left["size"]) == (rank, 3)
        assert "stalled" in left["text"]
        assert any("sleep_where" in line for lines in left["stacks"].values() for line in lines)
    waiting = json.loads(left_of(0).read_text())
    assert waiting["pending"] == ["allreduce.grads"]
    if step:
        assert waiting["entries"][-1]["state"] == "started"
        assert waiting["entries"][-1]["names"] == ["allreduce.grads"]
        assert all(entry["state"] == "completed" for entry in waiting["entries"][:-1])
        assert (tmp_path / "rank0.stall.json").exists(), "written when the stall was noticed"
        assert {"resume"} <= {one["what"] for one in waiting["decisions"]}


# --- the flight recorder


def test_the_last_batches_are_kept_and_no_more(tmp_path: Path) -> None:
    """Of both kinds, in their order, with sizes as torch's flight recorder has them; and nothing is kept where none is wanted."""

    def program(rank: int, job: Job) -> tuple[Path | None, int]:
        for step in range(40):
            ddl.allreduce(np.full((2, 3), step, np.float32), name="a")
        ddl.allgather(np.ones((rank + 1, 2)), name="b")
        return job.dump_flight("signal", "asked"), ddl.stats()["batches_replayed"]

    with World(2, settings={"flight_dir": str(tmp_path / "new"), "flight_records": 16}) as world:
        (path, replayed), _ = world.run(program)
    assert path == tmp_path / "new" / "rank0.signal.json"
    left = json.loads(path.read_text())
    launched = [entry for entry in left["entries"] if entry["replayed"]]
    assert len(launched) == 16 < replayed
    assert launched[-1]["input_sizes"] == [[2, 3]] and launched[-1]["input_dtypes"] == ["float32"]
    assert [entry["collective_seq_id"] for entry in launched] == sorted(
        entry["collective_seq_id"] for entry in launched
    )
    assert left["entries"][-1]["names"] == ["allgather.b"]
    assert left["entries"][-1]["profiling_name"] == "ddl:allgather"
    assert [entry["record_id"] for entry in left["entries"]] == list(range(len(left["entries"])))
    assert left["pg_config"] == {"0": {"name": "0", "ranks": [0, 1]}}
    assert {"resume", "freeze", "drain"} <= {one["what"] for one in left["decisions"]}


def test_no_launch_is_kept_where_none_is_wanted() -> None:
    """Who launches stores it all the same, without a question."""
    flight = Flight(0)
    flight.launches[5 & flight.mask] = (5, 5, Planned(0, Kind.ALLREDUCE, ("a",), (b"",)), 1)
    assert flight.entries(()) == []


def test_no_directory_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written where nobody has said where."""
    monkeypatch.chdir(tmp_path)
    with World(2) as world:
        assert world.run(lambda rank, job: job.dump_flight("signal", "asked")) == [None, None]
    assert list(tmp_path.iterdir()) == []
