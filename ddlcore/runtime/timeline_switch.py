"""Turns the timeline of one rank's job on and off, and passes the rank's events to it while it is on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddlcore.messages.elastic import WorldReport
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.reentry import Lock
from ddlcore.runtime.events import Events, Submitted

if TYPE_CHECKING:
    from ddlcore.runtime.recorder import Recorder


class TimelineSwitch:
    """Starts and ends the timeline of one rank, and receives the rank's events (see runtime.events.Events).

    User threads call ``begin`` and ``end``. Only one timeline can be recorded at a time; ``on`` says whether a timeline
    is being recorded.
    """

    def __init__(self, make: Callable[[], Recorder]) -> None:
        """Create the switch. No timeline is recorded yet. ``make`` creates the recorder, for the first timeline."""
        self.on = False
        self._make = make
        self._listener: Events | None = None
        self._recorder: Recorder | None = None
        self._lock = Lock()

    @property
    def inside(self) -> bool:
        """Return whether the calling thread is inside ``begin`` or ``end``."""
        return self._lock.held()

    def begin(
        self, file: Path, mark_cycles: bool, directory: Path | None, world: str, report: WorldReport | None = None
    ) -> None:
        """Begin to record a timeline into ``file``; see ``Recorder.begin``."""
        self._lock.refuse("start_timeline()")
        made = self._recorder or self._make()  # without the lock, because it imports modules
        with self._lock:
            self._recorder = self._recorder or made
            self._listener = self._recorder.begin(file, mark_cycles, directory, world, report)
            self.on = True

    def end(self, patience_s: float, leaving: bool = False) -> None:
        """End the timeline, if there is one; see ``Recorder.end``."""
        self._lock.refuse("stop_timeline()")
        with self._lock:
            self.on = False
            self._listener = None
            if self._recorder is not None:
                self._recorder.end(patience_s, leaving)

    # --- events, which are passed on to the recorder's listener while a timeline is recorded

    # Each method reads the listener once, because a user thread may end the timeline at any moment.

    def submitted(self, entries: Sequence[Submitted], together: bool) -> None:
        if (listener := self._listener) is not None:
            listener.submitted(entries, together)

    def decided(self, bucket: Bucket) -> None:
        if (listener := self._listener) is not None:
            listener.decided(bucket)

    def completed(self, ran: Bucket | Planned, place: int, begun_ns: int, ended_ns: int) -> None:
        if (listener := self._listener) is not None:
            listener.completed(ran, place, begun_ns, ended_ns)

    def waited(self, since_ns: int, until_ns: int) -> None:
        if (listener := self._listener) is not None:
            listener.waited(since_ns, until_ns)

    def resumed(self, epoch: int, schedule: int, buckets: Sequence[Planned], start: int) -> None:
        if (listener := self._listener) is not None:
            listener.resumed(epoch, schedule, buckets, start)

    def frozen(self, epoch: int) -> None:
        if (listener := self._listener) is not None:
            listener.frozen(epoch)

    def drained(self, epoch: int, begun_ns: int, valid: int, void: int) -> None:
        if (listener := self._listener) is not None:
            listener.drained(epoch, begun_ns, valid, void)

    def left(self, epoch: int) -> None:
        if (listener := self._listener) is not None:
            listener.left(epoch)
