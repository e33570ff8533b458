"""Runs one function on n threads, a rank each, under a deadline; knows neither jobs nor transports."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ddlcore.errors import Closed, PeerLost, TransportError

__all__ = ["DeadlinePassed", "Ranks"]

T = TypeVar("T")
Task = Callable[[], None]

AFTER_FAILURE_S = 2.0  # how long the other ranks may go on when one has raised
AFTER_ABORT_S = 5.0  # how long they may take to end once they were told to
SECONDARY = (PeerLost, Closed, TransportError)  # what the others raise because one did


class DeadlinePassed(AssertionError):
    """Some ranks did not end in time; the message holds the stack of every thread of the process."""


class _Outcome(Generic[T]):
    """What each rank came to, in the order in which they did."""

    def __init__(self) -> None:
        self.finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.values: dict[int, T] = {}
        self.errors: dict[int, BaseException] = {}


class Ranks:
    """n threads that live until ``close``: what must come from one thread (a rank's) always does.

    One thread uses the object. After DeadlinePassed with ranks that would not end, ``stuck`` is true
    and it is of no further use; its threads are daemons.
    """

    def __init__(self, size: int, name: str = "rank") -> None:
        self.size = size
        self.stuck = False
        self._tasks: list[queue.SimpleQueue[Task | None]] = [queue.SimpleQueue() for _ in range(size)]
        self._threads = [
            threading.Thread(target=_serve, args=(tasks,), name=f"{name}-{rank}", daemon=True)
            for rank, tasks in enumerate(self._tasks)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[[int], T], deadline_s: float, abort: Callable[[], None] | None = None) -> list[T]:
        """``function(rank)`` on every rank's thread; the results, by rank.

        Raises the first error that is not the mere consequence of another, with a note that names its
        rank and tells the other ranks' errors. Raises DeadlinePassed when ``deadline_s`` passes.
        ``abort`` is called (from this thread) then, and when one rank has raised and the others do
        not end by themselves: it must make them end.
        """
        assert not self.stuck, "these ranks hang in an earlier call; make new ones"
        outcome: _Outcome[T] = _Outcome()
        for rank, tasks in enumerate(self._tasks):
            tasks.put(_task(function, rank, outcome))
        missing = set(range(self.size))
        self._collect(outcome, missing, time.monotonic() + deadline_s)
        report = ""
        if missing:
            if not outcome.errors:
                report = f"{_names(missing)} of {self.size} did not end within {deadline_s:g} s\n{_stacks()}"
            fault = _aborted(abort)
            patience_s = AFTER_ABORT_S if not fault else 0.5
            self._collect(outcome, missing, time.monotonic() + patience_s, stop_early=False)
            self.stuck = bool(missing)
            report = f"{report}\n{fault}" if fault else report
        if report:
            raise DeadlinePassed(report + _told(outcome.errors))
        if outcome.errors:
            raise _first(outcome.errors, missing, self.size)
        return [outcome.values[rank] for rank in range(self.size)]

    def _collect(self, outcome: _Outcome[T], missing: set[int], until_s: float, *, stop_early: bool = True) -> None:
        while missing and (left_s := until_s - time.monotonic()) > 0:
            try:
                missing.discard(outcome.finished.get(timeout=left_s))
            except queue.Empty:
                return
            if stop_early and outcome.errors:
                until_s = min(until_s, time.monotonic() + AFTER_FAILURE_S)

    def close(self) -> None:
        """Ends the threads; those that hang are left behind."""
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            thread.join(0 if self.stuck else AFTER_ABORT_S)


def _aborted(abort: Callable[[], None] | None) -> str:
    """Calls it; what went wrong with it, which is the transport's fault, too."""
    try:
        if abort is not None:
            abort()
    except Exception as error:
        return f"abort: {type(error).__name__}: {error}"
    return ""


def _serve(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # else the last world's memory lives until the next task


def _task(function: Callable[[int], T], rank: int, outcome: _Outcome[T]) -> Task:
    def task() -> None:
        try:
            outcome.values[rank] = function(rank)
        except BaseException as error:  # also pytest's Skipped and Failed; it is raised again in the caller's thread
            outcome.errors[rank] = error
        finally:
            outcome.finished.put(rank)

    return task


def _first(errors: dict[int, BaseException], missing: set[int], size: int) -> BaseException:
    """The error to raise: the first that is not another's consequence, with notes about rank and others."""
    rank = next((r for r, e in errors.items() if not isinstance(e, SECONDARY)), next(iter(errors)))
    error = errors[rank]
    others = {r: e for r, e in errors.items() if r != rank}
    note = f"raised on rank {rank} of {size}" + _told(others)
    if missing:
        note += f"\n{_names(missing)} did not end after that\n{_stacks()}"
    error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined, unused-ignore]  # 3.11's add_note
    return error


def _names(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _told(errors: dict[int, BaseException]) -> str:
    return "".join(f"\nrank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(errors.items()))


def _stacks() -> str:
    """What every Python thread of this process is doing."""
    names: dict[int | None, Any] = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        text = "".join(traceback.format_stack(frame))
        parts.append(f"--- {names.get(ident, f'thread {ident}')}\n{text}")
    return "".join(parts)
