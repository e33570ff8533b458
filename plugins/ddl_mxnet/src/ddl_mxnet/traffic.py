"""Counts the operations that one job has in MXNet's engine, and keeps calls of one name in their order.

A user's thread that waits for an array waits inside MXNet, and ddl does not notice it. So when the engine has no more
operations to hand over to ddl, a thread of this module reports a waiting thread to the job. Then ddl leaves replay of a
schedule that cannot continue as soon as it would if the user had called ``wait``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ddlcore.contracts import Companion, JobService

LOOK_AGAIN_S = 0.02  # the pause between two looks while the engine still has operations to hand over
GRACE_S = 0.05  # after that time without a new operation the user is assumed to wait; within a step it is shorter
LEAST_S = 0.005  # the shortest pause between two looks
SLICE_S = 0.1  # user threads wait in slices of this length, so that Ctrl-C works
JOIN_S = 2.0  # how long ``close`` waits for the thread
STALL_S = 60.0  # how long ``settle`` waits without progress if ``stall_warning_s`` is 0

log = logging.getLogger(__name__)


class Traffic(Companion):
    """The record of one job's operations: pushed to MXNet's engine, running in ddl or ended. Any thread may call it."""

    def __init__(self, job: JobService) -> None:
        super().__init__(job)
        self._changed = threading.Condition()
        self._pushed = 0  # how many operations the engine has not called back yet
        self._running = 0  # how many operations the engine has handed to ddl
        self._quiet_since_s = 0.0  # when the engine handed over the last of its operations
        self._unsubmitted = (
            0  # calls that are not submitted yet: pushed, called back just now, or behind a call of the same name
        )
        self._closed = False
        self._lines: dict[Any, deque[_Place]] = {}
        self._thread: threading.Thread | None = None
        self._turns: dict[int | None, int] = {}
        self._generation = 0  # how many times all ranks have joined

    # --- calls without a name

    def turn(self, set_id: int | None) -> str:
        """Return a name for the gradient of a call without a name, made of a count of such calls in the process set.

        ``set_id`` is that of the process set. The user's thread calls this once for each such call, in their order.
        """
        with self._changed:
            ordinal = self._turns[set_id] = self._turns.get(set_id, -1) + 1
            return f"turn.{self._generation}.{ordinal}"

    def joined(self) -> None:
        """Start the counts of ``turn`` again after a join: ranks that joined early have made fewer calls."""
        with self._changed:
            self._generation += 1
            self._turns.clear()

    # --- the life of an operation

    def pushed(self) -> None:
        """Record that an operation was pushed to the engine. The first call starts the thread of ``_watch``."""
        with self._changed:
            self._pushed += 1
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name=f"ddl-mxnet-{self.job.rank}", daemon=True)
                self._thread.start()

    def called_back(self) -> None:
        """Record that the engine has handed an operation over to ddl."""
        with self._changed:
            self._pushed -= 1
            self._running += 1
            if self._pushed == 0:
                self._quiet_since_s = time.monotonic()
            if self._running == 1:
                self._changed.notify_all()

    def skipped(self) -> None:
        """Record that the engine will not hand an operation over, because one of its arrays could not be computed."""
        with self._changed:
            self._pushed -= 1
            self._changed.notify_all()

    def ended(self) -> None:
        """Record that an operation has ended."""
        with self._changed:
            self._running -= 1
            if self._running == 0:
                self._changed.notify_all()

    # --- calls of one name

    def queue(self, name: Any) -> _Place:
        """Return a place for a new call, behind all calls of ``name`` that have not ended.

        The user's thread calls this, so that the places are in the order of the user's calls.
        """
        with self._changed:
            line = self._lines.setdefault(name, deque())
            place = _Place(name, line)
            line.append(place)
            self._unsubmitted += 1
            return place

    def enter(self, place: _Place, begin: Callable[[], None]) -> None:
        """Call ``begin`` as soon as all calls before ``place`` have ended: now, or from ``quit``."""
        with self._changed:
            place.begin = begin
            mine = place.line[0] is place
        if mine:
            begin()

    def submitted(self, place: _Place) -> None:
        """Record that the call of ``place`` was submitted to ddl, or that it never will be."""
        with self._changed:
            self._has_submitted(place)

    def _has_submitted(self, place: _Place) -> None:
        if not place.submitted:
            place.submitted = True
            self._unsubmitted -= 1
            if self._unsubmitted == 0:
                self._changed.notify_all()

    def quit(self, place: _Place) -> None:
        """Record that the call of ``place`` has ended, and begin the next call of the same name."""
        with self._changed:
            self._has_submitted(place)
            first = place.line[0] is place
            place.line.remove(place)
            following = place.line[0] if place.line and first else None
            if not place.line:
                self._lines.pop(place.name, None)
            begin = following.begin if following is not None else None
        if begin is not None:
            begin()

    # --- waiting

    def handed_over(self) -> None:
        """Wait until ddl has all operations that the user has called so far, or until the job has ended."""
        self._wait(lambda: self._pushed == self._unsubmitted == 0)

    def settle(self) -> None:
        """Wait until all operations of this rank have ended, or until the job has ended.

        If no operation ends for ``stall_warning_s`` seconds, it logs a warning and returns: then other ranks have not
        submitted the remaining operations.
        """
        patience_s = self.job.settings.number("stall_warning_s") or STALL_S
        seen, since_s = (0, 0), time.monotonic()
        with self._changed:
            while self._pushed or self._running:
                now_s = time.monotonic()
                if not self._running or (self._pushed, self._running) != seen:
                    seen, since_s = (self._pushed, self._running), now_s
                elif now_s - since_s > patience_s:
                    log.warning("rank %d ends with %d calls that its peers lack", self.job.rank, self._running)
                    return
                if self.job.closed:
                    return
                self._changed.wait(SLICE_S)

    def _wait(self, over: Callable[[], bool]) -> None:
        with self._changed:
            while not over() and not self.job.closed:
                self._changed.wait(SLICE_S)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)

    def _watch(self) -> None:
        """Report to the job that a thread waits, while operations run in ddl and the engine hands over no more.

        This is the main function of the thread.
        """
        while True:
            with self._changed:
                while self._running == 0 and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                since_s = self._quiet_since_s + GRACE_S if self._pushed == 0 else None
            pause_s = LOOK_AGAIN_S if since_s is None else max(self.job.check_stall(since_s), LEAST_S)
            with self._changed:
                if self._running and not self._closed:
                    self._changed.wait(pause_s)


class _Place:
    """The place of a call in the queue of all calls of the same name."""

    __slots__ = ("begin", "line", "name", "submitted")

    def __init__(self, name: Any, line: deque[_Place]) -> None:
        self.name = name
        self.line = line
        self.submitted = False
        self.begin: Callable[[], None] | None = None
