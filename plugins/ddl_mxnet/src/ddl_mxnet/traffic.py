"""Counts what one job has under way in MXNet's engine, and keeps calls of one name in their order.

The user's thread waits in MXNet, where ddl does not see it; so when nothing more can come from the engine, this
waits in its place, and ddl leaves a schedule that cannot go on as soon as if the user had called ``wait``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ddlcore.api import Companion

__all__ = ["Traffic"]

LOOK_AGAIN_S = 0.02  # while the engine still has operations to hand over
GRACE_S = 0.05  # that the user waits is a guess; in a step the next operation comes sooner
LEAST_S = 0.005
SLICE_S = 0.1  # users wait in slices, so that Ctrl-C works
JOIN_S = 2.0


class Traffic(Companion):
    """One job's operations: pushed to MXNet's engine, then running, then over. Any thread."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self._changed = threading.Condition()
        self._pushed = 0  # the engine has not called back yet
        self._running = 0  # handed to ddl
        self._quiet_since_s = 0.0  # when the engine had handed over all it had
        self._closed = False
        self._lines: dict[Any, deque[_Place]] = {}
        self._thread: threading.Thread | None = None

    # --- the life of an operation

    def pushed(self) -> None:
        """An operation goes to the engine."""
        with self._changed:
            self._pushed += 1
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name=f"ddl-mxnet-{self.job.rank}", daemon=True)
                self._thread.start()

    def called_back(self) -> None:
        """The engine has handed it over."""
        with self._changed:
            self._pushed -= 1
            self._running += 1
            if self._pushed == 0:
                self._quiet_since_s = time.monotonic()
            if self._running == 1:
                self._changed.notify_all()

    def skipped(self) -> None:
        """The engine will not hand it over: an array of it could not be computed."""
        with self._changed:
            self._pushed -= 1
            self._changed.notify_all()

    def ended(self) -> None:
        """It is over."""
        with self._changed:
            self._running -= 1
            if self._running == 0:
                self._changed.notify_all()

    # --- calls of one name

    def queue(self, name: Any) -> _Place:
        """A place behind the calls of that name that are not over. In the order of the user's calls."""
        with self._changed:
            line = self._lines.setdefault(name, deque())
            place = _Place(name, line)
            line.append(place)
            return place

    def enter(self, place: _Place, begin: Callable[[], None]) -> None:
        """Calls ``begin`` when it is the turn of ``place``: now, or when the call before it is over."""
        with self._changed:
            place.begin = begin
            mine = place.line[0] is place
        if mine:
            begin()

    def quit(self, place: _Place) -> None:
        """The call is over: it is the next one's turn."""
        with self._changed:
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
        """Returns when the engine has called back for all that has been pushed so far."""
        self._wait(lambda: self._pushed == 0)

    def settle(self) -> None:
        self._wait(lambda: self._pushed == self._running == 0)

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
        """The thread that waits in the user's place."""
        while True:
            with self._changed:
                while self._running == 0 and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                since_s = self._quiet_since_s + GRACE_S if self._pushed == 0 else None
            pause_s = LOOK_AGAIN_S if since_s is None else max(self.job.completion.watch(since_s), LEAST_S)
            with self._changed:
                if self._running and not self._closed:
                    self._changed.wait(pause_s)


class _Place:
    """Where a call stands among those of its name."""

    __slots__ = ("begin", "line", "name")

    def __init__(self, name: Any, line: deque[_Place]) -> None:
        self.name = name
        self.line = line
        self.begin: Callable[[], None] | None = None
