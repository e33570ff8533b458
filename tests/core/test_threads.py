"""ddl's own threads are known while they start, run and end; user code that runs on one by chance is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ddl_doctor.recording.part_writer import Timeline

import ddlcore as ddl
from ddlcore import threads
from ddlcore.process.job import Job
from ddlcore.testing import run_world
from ddlcore.threads import OwnThread, on_own_thread


def before_its_function(thread: threading.Thread, call: Callable[[], None]) -> None:
    """Let ``thread`` call ``call`` where a finalizer can run: just before it tells its starter that it runs."""
    started: Any = thread._started  # type: ignore[attr-defined]  # there is no public way to run code at this moment
    tell = started.set

    def set_later() -> None:
        call()
        tell()

    started.set = set_later


def test_a_thread_is_known_from_its_start_to_its_end() -> None:
    seen: list[bool] = []
    go = threading.Event()

    def work() -> None:
        seen.append(on_own_thread())
        go.wait(40.0)

    thread = OwnThread(target=work, name="ddl-test")
    before_its_function(thread, lambda: seen.append(on_own_thread()))
    assert not on_own_thread()
    thread.start()
    others: list[bool] = []
    other = threading.Thread(target=lambda: others.append(on_own_thread()))
    other.start()
    other.join(40.0)
    go.set()
    thread.join(40.0)
    assert (seen, others, on_own_thread()) == ([True, True], [False], False)
    assert thread.daemon


def test_an_ended_thread_is_forgotten() -> None:
    """Its ident may belong to a user's thread now, and it keeps nothing alive."""
    thread = OwnThread(target=int)
    thread.start()
    thread.join(40.0)
    assert not any(one is thread for one in threads._started)


def test_a_thread_that_cannot_be_started_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    thread = OwnThread(target=lambda: None)
    with pytest.raises(RuntimeError, match="can't start"):
        thread.start()
    assert not any(one is thread for one in threads._started)


def test_a_forked_child_has_none() -> None:
    go = threading.Event()
    thread = OwnThread(target=go.wait, args=(40.0,))
    thread.start()
    child = os.fork()
    if child == 0:
        os._exit(len(threads._started))
    _, status = os.waitpid(child, 0)
    go.set()
    thread.join(40.0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_finalizer_on_a_thread_that_is_being_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not stop the timeline: the holder of the timeline's lock waits for this very thread."""
    refused: list[str] = []
    start = Timeline.start

    def play(rank: int, job: Job) -> None:
        def finalize() -> None:
            try:
                job.stop_timeline()
            except ddl.ReentrantCall as error:
                refused.append(str(error))

        def start_with_a_finalizer(timeline: Timeline) -> None:
            before_its_function(timeline._thread, finalize)
            start(timeline)

        monkeypatch.setattr(Timeline, "start", start_with_a_finalizer)
        job.start_timeline(str(tmp_path / "trace.json"))
        job.stop_timeline()

    run_world(1, play)
    assert len(refused) == 1 and refused[0].startswith("stop_timeline() was called by a signal handler or a finalizer")


@pytest.mark.parametrize("call", [ddl.init, ddl.shutdown], ids=["init", "shutdown"])
def test_a_finalizer_on_one_of_ddls_threads(call: Callable[[], None]) -> None:
    """It may not begin or end the job: another thread may be inside ``init`` and wait for this one."""
    raised: list[BaseException] = []

    def finalize() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = OwnThread(target=finalize)
    thread.start()
    thread.join(40.0)
    assert [type(error) for error in raised] == [ddl.ReentrantCall]
