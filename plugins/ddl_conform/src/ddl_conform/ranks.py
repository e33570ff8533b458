"""Runs one function on several threads, one thread for each rank, with a deadline.

This module uses neither jobs nor transports.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ddlcore.errors import Closed, PeerLost, TransportError
from ddlcore.observe.stacks import all_stacks

__all__ = ["DeadlinePassed", "Ranks"]

T = TypeVar("T")
Task = Callable[[], None]

AFTER_FAILURE_S = 2.0  # how long the other ranks may continue after one rank has raised an error
AFTER_ABORT_S = 5.0  # how long the ranks may take to end after the abort
SECONDARY = (PeerLost, Closed, TransportError)  # errors that ranks raise as a consequence of another rank's error


class DeadlinePassed(AssertionError):
    """Raised if some ranks have not ended at the deadline.

    The message contains the stack of every Python thread of the process.
    """


class _Outcome(Generic[T]):
    """The results and errors of the ranks in one call of ``Ranks.run``, and the order in which the ranks ended."""

    def __init__(self) -> None:
        self.finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.values: dict[int, T] = {}
        self.errors: dict[int, BaseException] = {}


class Ranks:
    """The threads of ``size`` ranks. The threads live until ``close``, so all calls of a rank run in the same thread.

    Only one thread may use this object. If a rank still runs after ``run`` has raised an error, ``stuck`` is true, and
    ``run`` must not be called any more. The threads are daemons, so they do not keep the process alive.
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
        """Call ``function(rank)`` on every rank's thread, and return the results in the order of the ranks.

        If ranks raise errors, one of them is raised here. PeerLost, Closed and TransportError are usually only
        consequences of another rank's failure. So the first error of any other class is raised, or the first error of
        all if there is no other class. A note is added that names the rank and lists the errors of the other ranks.
        Raises DeadlinePassed if some ranks have not ended after ``deadline_s`` seconds.

        ``abort`` must make all ranks end. It is called in the calling thread in two cases: if the deadline has passed,
        or if one rank has raised an error and the other ranks have not ended 2 s later.
        """
        assert not self.stuck, "these ranks hang in an earlier call; make new ones"
        outcome: _Outcome[T] = _Outcome()
        for rank, tasks in enumerate(self._tasks):
            tasks.put(_task(function, rank, outcome))
        missing = set(range(self.size))
        self._collect(outcome, missing, time.monotonic() + deadline_s)
        report = ""
        if missing:
            # When one rank has failed, its peers wait inside a collective for data that never comes. So they are
            # aborted after a short time, instead of waiting until the deadline. The stacks are taken before the abort,
            # because afterwards they would no longer show where the ranks were blocked.
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
        """End the threads of the ranks. If a thread hangs in a call, it is left running."""
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            thread.join(0 if self.stuck else AFTER_ABORT_S)


def _aborted(abort: Callable[[], None] | None) -> str:
    """Call ``abort`` if it is not None. If it raises an error, return this error as text; otherwise return "".

    The caller reports this error, because it may be an error of the transport.
    """
    try:
        if abort is not None:
            abort()
    except Exception as error:
        return f"abort: {type(error).__name__}: {error}"
    return ""


def _serve(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # a reference would keep the memory of the last world alive until the next task


def _task(function: Callable[[int], T], rank: int, outcome: _Outcome[T]) -> Task:
    def task() -> None:
        try:
            outcome.values[rank] = function(rank)
        except BaseException as error:  # includes pytest's Skipped and Failed; raised again in the caller's thread
            outcome.errors[rank] = error
        finally:
            outcome.finished.put(rank)

    return task


def _first(errors: dict[int, BaseException], missing: set[int], size: int) -> BaseException:
    """Choose one of ``errors`` to raise, add a note to it, and return it. ``errors`` maps each rank to its error.

    The first error whose class is not in SECONDARY is chosen. If the classes of all errors are in SECONDARY, the first
    error is chosen. The note contains the rank, the errors of the other ranks, and the ranks ``missing``, which have
    not ended. ``size`` is the number of all ranks.
    """
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
    """Return the stacks of all Python threads of this process as one text."""
    return "".join("\n".join([f"--- {name}", *lines, ""]) for name, lines in all_stacks().items())
