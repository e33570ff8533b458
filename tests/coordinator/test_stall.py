"""A stall: who is waited for and what it is doing, the end of a job that stalls for too long, and what is left in files."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.coordinator.coordinator import Coordinator
from ddlcore.coordinator.stall import StallWatch
from ddlcore.coordinator.stall_table import Late
from ddlcore.coordinator.tuning import Tuning
from ddlcore.errors import DeadlineExceeded
from ddlcore.messages.coding import encode
from ddlcore.messages.observing import Alive, Busy, Probe, ReplayStatus, Show, Stack
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.spec import Ask, Spec
from ddlcore.messages.to_coordinator import Bye, Frozen, Leave, Paused, Request
from ddlcore.messages.to_rank import Planned, Stalled
from ddlcore.observe.flight import Flight
from ddlcore.process.job import Job
from ddlcore.runtime.patience import Patience
from ddlcore.testing import World
from ddlcore.types import Kind

pytestmark = pytest.mark.timeout(270)

SPEC = encode(Spec(Kind.ALLREDUCE, shape=(2,)))


class NoFusion(FusionPolicy):
    """Each by itself."""

    def arrange(self, ready: Any, params: Any) -> list[list[int]]:
        return [[i] for i in range(len(ready))]


def watch(size: int = 3, asks: int = 2, **patience: Any) -> tuple[Coordinator, StallWatch[WorldRank]]:
    """A world in which the first ranks have asked for one tensor."""
    coordinator = Coordinator(size, NoFusion(), 0)
    for rank in range(asks):
        coordinator.handle(rank, Request(0, 1, (Ask(0, "allreduce.late", SPEC),)))
    ranks = tuple(map(WorldRank, range(size)))
    one = StallWatch(coordinator.awaited, ranks, Patience(**patience), ranks)
    assert one.look(0.0) == ([], [])
    return coordinator, one


def answer(one: StallWatch[WorldRank], *ranks: int, text: str = "its own code is elsewhere") -> None:
    for rank in ranks:
        one.spoke(rank)
        one.hear(rank, Alive(text))


def test_a_missing_rank_is_asked_for_a_sign_of_life_before_the_report_and_for_its_stack_behind() -> None:
    """Who answers is said to, with what it has under way; the stack follows, once, and only if it is wanted."""
    _, one = watch(warning_s=10.0, stacks=True)
    assert one.look(7.0) == ([], [])
    assert one.look(8.0) == ([], [(2, Probe())])
    answer(one, 2)
    assert one.look(9.0) == ([], [])
    (text,), told = one.look(10.0)
    assert text.splitlines() == [
        "stalled for more than 10 s in discovery:",
        "  tensor          ready on  missing ranks  waits s",
        "  allreduce.late  0-1       2                 10.0",
        "  rank 2 answers: its own code is elsewhere",
        "  the ranks may run different code, or one of them is slow",
    ]
    assert told == [(2, Show())]
    assert one.look(11.0) == ([], [])
    one.hear(2, Stack("  File train.py, line 3\n"))
    assert one.look(11.5) == (["rank 2 is here:\n  File train.py, line 3"], [])
    assert one.look(60.0) == ([], [])
    _, plain = watch(warning_s=10.0)
    plain.look(8.0)
    answer(plain, 2)
    assert plain.look(10.0)[1] == []


def test_a_rank_that_does_not_answer_at_all_is_said_to() -> None:
    """Since when, what it was asked, and why that may be; its stack is not asked for. When it is back, that is told."""
    _, one = watch(warning_s=10.0, stacks=True)
    one.hear(2, Stack("unasked"))
    one.spoke(2)
    one.look(5.0)
    one.look(8.0)
    (text,), told = one.look(10.0)
    assert told == []
    assert text.splitlines()[3:] == [
        "  rank 2 does not answer at all: no message from it for 5.0 s, and it was last asked for a sign of life; "
        "its process is stopped, or a call in native code holds the interpreter lock"
    ]
    one.look(11.0)
    answer(one, 2)
    assert one.look(12.0) == (["rank 2 answers again, after 7.0 s of silence"], [])
    assert one.look(13.0) == ([], [])


def test_a_report_waits_for_the_answers_but_not_for_ever() -> None:
    """Where the first look comes after the warning time, whoever is asked then has its time to answer."""
    _, one = watch(warning_s=10.0)
    assert one.look(10.0) == ([], [(2, Probe())])
    assert one.look(11.0) == ([], [])
    (text,), _ = one.look(12.0)
    assert "rank 2 does not answer at all" in text


def test_ranks_of_which_the_same_is_known_are_told_together() -> None:
    """Of a thousand ranks the report stays short."""
    _, one = watch(9, 1, warning_s=10.0, stacks=True)
    _, told = one.look(8.0)
    assert [rank for rank, _ in told] == list(range(1, 9))
    answer(one, *range(1, 7))
    (text,), told = one.look(10.0)
    assert "allreduce.late  0         1-8" in text
    assert "ranks 7-8 do not answer at all: no message from them" in text
    assert "ranks 1-6 answer: its own code is elsewhere" in text
    assert [rank for rank, _ in told] == list(range(1, 7))
    for rank in range(1, 6):
        one.hear(rank, Stack("  here" if rank != 4 else "  there"))
    assert one.look(11.0)[0] == ["ranks 1-3,5 are here:\n  here", "rank 4 is here:\n  there"]
    (text,), _ = one.look(12.0)
    assert "no stack came from rank 6" in text


def test_a_stall_ends_the_job_after_its_time_and_names_who_is_silent() -> None:
    """Every rank is told, once, what waited for whom; also where stalls are not reported. Who answers is not to be killed."""
    for silent in (False, True):
        _, one = watch(warning_s=0.0, shutdown_s=30.0)
        assert one.look(27.0) == ([], [])
        assert one.look(29.0) == ([], [(2, Probe())])
        if not silent:
            answer(one, 2)
            assert one.look(29.5) == ([], [])
        texts, told = one.look(31.0)
        assert texts == []
        assert [rank for rank, _ in told] == [0, 1, 2]
        message = told[0][1]
        assert isinstance(message, Stalled)
        assert message.text.startswith("stalled for more than 30 s (DDL_STALL_SHUTDOWN_S)")
        assert "'allreduce.late' is ready on ranks 0-1, but not on rank 2" in message.text
        assert ("rank 2 does not answer at all" in message.text) is silent
        assert list(one.dead) == ([2] if silent else [])
        assert one.look(32.0) == ([], [])


def test_without_limits_nobody_is_asked() -> None:
    """0 s: never."""
    _, one = watch(warning_s=0.0, shutdown_s=0.0)
    assert one.look(1e6) == ([], [])


def test_a_rank_that_wakes_up_in_time_ends_nothing() -> None:
    """Between the warning and the end the missing tensor comes: a later wait begins at zero."""
    coordinator, one = watch(warning_s=10.0, shutdown_s=20.0)
    one.look(8.0)
    assert len(one.look(10.0)[0]) == 1
    coordinator.handle(2, Request(0, 1, (Ask(0, "allreduce.late", SPEC),)))
    one.spoke(2)
    assert one.look(15.0)[0] == ["rank 2 answers again, after 15.0 s of silence"]
    coordinator.handle(0, Request(0, 2, (Ask(0, "allreduce.late", SPEC),)))
    assert one.look(20.0) == ([], [])
    assert one.look(27.0) == ([], [])


def silent_wait(ranks: tuple[int, ...], ends: bool = True) -> Awaited[WorldRank]:
    return Awaited(("rest",), "in shutdown()", "to let go", lambda: Details(ranks), only_silent=True, ends=ends)


def test_a_wait_without_hurry_counts_from_the_first_question_without_an_answer() -> None:
    """As long as the ranks answer, an end may take its time; ``ends``: whether silence may end the job."""
    for ends in (True, False):
        one = StallWatch(lambda ends=ends: [silent_wait((1,), ends)], range(2), Patience(10.0, 20.0), range(2))  # type: ignore[misc]  # the default binds it
        for second in range(100):
            texts, told = one.look(float(second))
            assert texts == []
            if told:
                answer(one, 1)
        texts = [text for second in range(100, 140) for text in one.look(float(second))[0]]
        assert len(texts) == 1 and "rank 1 does not answer at all" in texts[0]
        assert one.over is ends
        assert list(one.dead) == ([1] if ends else [])


# --- what the coordinator waits for


def replaying(size: int = 2) -> Coordinator:
    """A world that replays one tensor."""
    coordinator = Coordinator(size, NoFusion(), 0)
    for step in range(1, 9):
        for rank in range(size):
            asks = (Ask(0, "x", SPEC, stamp=step - 2),)
            coordinator.handle(rank, Request(coordinator.epoch, step, asks))
        if coordinator.replay_controller.replaying is not None:
            return coordinator
    raise AssertionError("it does not replay")


def test_a_freeze_that_a_rank_does_not_answer_is_waited_for() -> None:
    """The whole of it: tensors, who has them, who is missing, and that the wait began before the freeze."""
    coordinator = replaying(3)
    assert coordinator.awaited() == []
    epoch = coordinator.epoch
    replay_status = ReplayStatus(epoch, 0, True, 0, ("x",), waits_s=1.5)
    told = coordinator.handle(0, Leave(epoch, "a bucket waits", True, replay_status))
    assert [rank for rank, _ in told] == [0, 1, 2]
    (wait,) = coordinator.awaited()
    assert wait.asked == f"to stop launching (Freeze of epoch {epoch})"
    assert wait.waited_s == 1.5
    assert wait.details() == Details((0, 1, 2), (Late("x", 0, (0,), (1, 2), 0.0),))
    coordinator.handle(0, Frozen(epoch, ((0, 0),)))
    coordinator.handle(2, Frozen(epoch, ((0, 0),)))
    assert wait.details() == Details((1,), (Late("x", 0, (0, 2), (1,), 0.0),))
    coordinator.handle(1, Frozen(epoch, ((0, -1),)))
    assert coordinator.awaited() == []


def test_a_goodbye_that_waits_for_a_freeze_says_so() -> None:
    """A rank has called shutdown(), and another does not stop launching."""
    coordinator = replaying()
    coordinator.handle(0, Bye("called shutdown()"))
    coordinator.handle(0, Frozen(coordinator.epoch, ((0, -1),)))
    (wait,) = coordinator.awaited()
    assert wait.details() == Details((1,), (), ("rank 0 leaves: called shutdown()",))


def test_a_join_waits_for_those_that_train_on() -> None:
    """It begins anew with each bucket that is decided meanwhile."""
    coordinator = Coordinator(2, NoFusion(), 0)
    join = encode(Spec(Kind.JOIN))
    coordinator.handle(0, Request(0, 1, (Ask(0, "join.0", join),)))
    (wait,) = coordinator.awaited()
    assert wait.where == "in join()" and wait.details().ranks == (1,)
    coordinator.handle(1, Request(0, 1, (Ask(0, "x", SPEC),)))
    (later,) = coordinator.awaited()
    assert later.key != wait.key
    coordinator.handle(1, Request(0, 2, (Ask(0, "join.1", join),)))
    assert coordinator.awaited() == []


def test_the_end_of_a_leg_waits_for_those_that_have_not_come_to_it() -> None:
    """While settings are searched; nobody is waited for before the first has come there, nor behind the last."""
    driver: Any = SimpleNamespace(given={})  # is asked for nothing else before a trial that is aligned
    tuning = Tuning(driver, {})
    tuning.begin(False, frozenset({0, 1, 2}))
    assert tuning.awaited() == ()
    assert not tuning.paused(1, Paused(0, ()))
    assert tuning.awaited() == (0, 2)
    assert not tuning.paused(0, Paused(0, ()))
    assert tuning.paused(2, Paused(0, ()))
    assert tuning.awaited() == ()


def test_a_decided_bucket_is_the_ranks_to_tell_of() -> None:
    """The coordinator has done its part when it has decided; a rank that sits in it says so, in any epoch."""
    coordinator = Coordinator(2, NoFusion(), 0)
    coordinator.handle(0, Busy("allreduce 'x'", 4, 0, ("x",), 58.0))
    (wait,) = coordinator.awaited()
    assert wait.details().ranks == (1,)


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


def test_the_last_buckets_are_kept_and_no_more(tmp_path: Path) -> None:
    """Of both kinds, in their order, with sizes as torch's flight recorder has them; and nothing is kept where none is wanted."""

    def program(rank: int, job: Job) -> tuple[Path | None, int]:
        for step in range(40):
            ddl.allreduce(np.full((2, 3), step, np.float32), name="a")
        ddl.allgather(np.ones((rank + 1, 2)), name="b")
        return job.dump_flight("signal", "asked"), ddl.stats()["buckets_replayed"]

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
