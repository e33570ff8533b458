"""Counts the operations that one job has in MXNet's engine, and keeps calls of one name in their order.

The user's thread waits inside MXNet, where ddl does not see it. So when the engine has nothing more to hand over, a
thread of this module waits in its place. Then ddl leaves replay of a schedule that cannot continue as soon as it would
if the user had called ``wait``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ddlcore.contracts import Companion, JobService

LOOK_AGAIN_S = 0.02  # while the engine still has operations to hand over
GRACE_S = 0.05  # before the user is assumed to wait; within a step the next operation comes sooner than that
LEAST_S = 0.005  # the shortest pause between two looks
SLICE_S = 0.1  # user threads wait in slices of this length, so that Ctrl-C works
JOIN_S = 2.0  # how long ``close`` waits for the thread
STALL_S = 60.0  # the patience of ``settle`` if stalls are not reported

log = logging.getLogger(__name__)


class Traffic(Companion):
    """The operations of one job: pushed to MXNet's engine, then running in ddl, then over. Any thread may call it."""

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
        """Return a name for the gradient of a call without a name, made of its ordinal among such calls of the set.

        ``set_id``: the process set. The user's thread calls it, in the order of its calls.
        """
        with self._changed:
            ordinal = self._turns[set_id] = self._turns.get(set_id, -1) + 1
            return f"turn.{self._generation}.{ordinal}"

    def joined(self) -> None:
        """Start the ordinals again after a join: some ranks had made fewer calls, so their counts differ."""
        with self._changed:
            self._generation += 1
            self._turns.clear()

    # --- the life of an operation

    def pushed(self) -> None:
        """Note that an operation is pushed to the engine."""
        with self._changed:
            self._pushed += 1
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name=f"ddl-mxnet-{self.job.rank}", daemon=True)
                self._thread.start()

    def called_back(self) -> None:
        """Note that the engine has handed an operation over to ddl."""
        with self._changed:
            self._pushed -= 1
            self._running += 1
            if self._pushed == 0:
                self._quiet_since_s = time.monotonic()
            if self._running == 1:
                self._changed.notify_all()

    def skipped(self) -> None:
        """Note that the engine will not hand an operation over, because an array of it could not be computed."""
        with self._changed:
            self._pushed -= 1
            self._changed.notify_all()

    def ended(self) -> None:
        """Note that an operation has ended."""
        with self._changed:
            self._running -= 1
            if self._running == 0:
                self._changed.notify_all()

    # --- calls of one name

    def queue(self, name: Any) -> _Place:
        """Return a place behind all calls of that name which have not ended, in the order of the user's calls."""
        with self._changed:
            line = self._lines.setdefault(name, deque())
            place = _Place(name, line)
            line.append(place)
            self._unsubmitted += 1
            return place

    def enter(self, place: _Place, begin: Callable[[], None]) -> None:
        """Call ``begin`` when it is the turn of ``place``: now, or when the call before it has ended."""
        with self._changed:
            place.begin = begin
            mine = place.line[0] is place
        if mine:
            begin()

    def submitted(self, place: _Place) -> None:
        """Note that the call was submitted to ddl, or never will be."""
        with self._changed:
            self._has_submitted(place)

    def _has_submitted(self, place: _Place) -> None:
        if not place.submitted:
            place.submitted = True
            self._unsubmitted -= 1
            if self._unsubmitted == 0:
                self._changed.notify_all()

    def quit(self, place: _Place) -> None:
        """Note that the call has ended, and begin the next call of the same name."""
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
        """Wait until all operations that the user has asked for so far are submitted to ddl, or the job has ended."""
        self._wait(lambda: self._pushed == self._unsubmitted == 0)

    def settle(self) -> None:
        """Wait until all operations have ended, or the job has.

        Gives up with a warning if no operation ends for ``stall_warning_s``: then other ranks have not submitted them.
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
        """Wait in the user's place; this is the thread's main function."""
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
    """The place of a call among the calls of the same name."""

    __slots__ = ("begin", "line", "name", "submitted")

    def __init__(self, name: Any, line: deque[_Place]) -> None:
        self.name = name
        self.line = line
        self.submitted = False
        self.begin: Callable[[], None] | None = None
