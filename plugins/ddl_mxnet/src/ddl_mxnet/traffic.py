"""Counts the operations that one job has in MXNet's engine, and keeps calls of the same name in their order.

If a user's thread waits for an array, the thread waits inside MXNet, and ddl does not notice it. Therefore this module
has a thread of its own. When operations run in ddl and the engine has no more operations to hand over to ddl, the
module's thread reports the waiting user's thread to the job. So if ddl replays a schedule that cannot continue, ddl
leaves replay as early as if the user had called ``wait`` of ddl.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ddlcore.contracts import Companion, JobService

LOOK_AGAIN_S = 0.02  # the pause between two checks while the engine still has operations to hand over
GRACE_S = 0.05  # after that time without a new operation the user is assumed to wait; within a step it is shorter
LEAST_S = 0.005  # the shortest pause between two checks
SLICE_S = 0.1  # user threads wait in slices of this length, so that Ctrl-C works
JOIN_S = 2.0  # how long ``close`` waits for the thread
STALL_S = 60.0  # how long ``settle`` waits without progress if ``stall_warning_s`` is 0

log = logging.getLogger(__name__)


class EngineTraffic(Companion):
    """The record of all operations of one job: how many are in MXNet's engine, and how many run in ddl.

    Any thread may call its methods.
    """

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
        """Return a name for the backward pass of a collective that was called without a name.

        The name contains the number of such calls so far in the process set ``set_id``. The user's thread must call
        this method once for each such call, in the order of the calls.
        """
        with self._changed:
            ordinal = self._turns[set_id] = self._turns.get(set_id, -1) + 1
            return f"turn.{self._generation}.{ordinal}"

    def joined(self) -> None:
        """Set the counts of ``turn`` to 0 after a join, because ranks that joined early have made fewer calls."""
        with self._changed:
            self._generation += 1
            self._turns.clear()

    # --- the life of an operation

    def pushed(self) -> None:
        """Record that an operation is pushed to the engine. The first call starts the thread that runs ``_watch``."""
        with self._changed:
            self._pushed += 1
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name=f"ddl-mxnet-{self.job.rank}", daemon=True)
                self._thread.start()

    def called_back(self) -> None:
        """Record that the engine has called an operation back, and so has handed it over to ddl."""
        with self._changed:
            self._pushed -= 1
            self._running += 1
            if self._pushed == 0:
                self._quiet_since_s = time.monotonic()
            if self._running == 1:
                self._changed.notify_all()

    def skipped(self) -> None:
        """Record that the engine will not hand over a pushed operation, because an array could not be computed."""
        with self._changed:
            self._pushed -= 1
            self._changed.notify_all()

    def ended(self) -> None:
        """Record that an operation which the engine had handed over has ended."""
        with self._changed:
            self._running -= 1
            if self._running == 0:
                self._changed.notify_all()

    # --- calls of one name

    def queue(self, name: Any) -> _Place:
        """Return a place for a new call, in the queue of all calls of ``name`` that have not ended.

        The user's thread calls this method, so that the places are in the order of the user's calls.
        """
        with self._changed:
            line = self._lines.setdefault(name, deque())
            place = _Place(name, line)
            line.append(place)
            self._unsubmitted += 1
            return place

    def enter(self, place: _Place, begin: Callable[[], None]) -> None:
        """Call ``begin`` as soon as all calls before ``place`` in its queue have ended.

        If no call is before ``place``, ``begin`` is called now. If there is one, ``quit`` calls ``begin`` later.
        """
        with self._changed:
            place.begin = begin
            mine = place.line[0] is place
        if mine:
            begin()

    def submitted(self, place: _Place) -> None:
        """Record that ``handed_over`` need not wait for the call at ``place`` any longer.

        The reason is that the call was submitted to ddl, or that its submission has failed.
        """
        with self._changed:
            self._has_submitted(place)

    def _has_submitted(self, place: _Place) -> None:
        if not place.submitted:
            place.submitted = True
            self._unsubmitted -= 1
            if self._unsubmitted == 0:
                self._changed.notify_all()

    def quit(self, place: _Place) -> None:
        """Record that the call at ``place`` has ended, and begin the next call of the same name if it is ready."""
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
        """Wait until all collectives that the user has called so far were submitted to ddl, or the job has ended."""
        self._wait(lambda: self._pushed == self._unsubmitted == 0)

    def settle(self) -> None:
        """Wait until all operations of this rank have ended, or until the job has ended.

        If no operation ends for ``stall_warning_s`` seconds (60 s if this setting is 0), log a warning and return. In
        this case, other ranks have not submitted the remaining operations.
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
        """Run the thread that reports a waiting user's thread to the job.

        The thread reports it while operations run in ddl and the engine has no more operations to hand over.
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
    """The place of a call in ``line``, the queue of all calls that have the same name and have not ended."""

    __slots__ = ("begin", "line", "name", "submitted")

    def __init__(self, name: Any, line: deque[_Place]) -> None:
        self.name = name
        self.line = line
        self.submitted = False
        self.begin: Callable[[], None] | None = None
