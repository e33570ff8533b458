"""Defines what the parts of a rank tell about its operations, for the timeline; knows nobody who listens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ddlcore.messages import Bucket, Planned


class Submitted(Protocol):
    """What a listener may read of an operation that is submitted."""

    set_id: int
    name: str
    spec_bytes: bytes


class Events(Protocol):
    """An object that is told what happens to the operations of one rank, on the thread on which it happens.

    It must return soon, take no lock of ddl, and not raise. Callers for which a call is too expensive (about 50 ns for
    each bucket) ask for ``on`` first.
    """

    @property
    def on(self) -> bool:
        """Return whether anybody listens. It may change at any moment, so all methods may be called while it is False."""

    def submitted(self, entries: Sequence[Submitted], together: bool) -> None:
        """Note that a user's thread is about to submit ``entries``; ``together``: they are persistent requests."""

    def decided(self, bucket: Bucket) -> None:
        """Note that the coordinator has decided on a bucket."""

    def completed(self, ran: Bucket | Planned, place: int, begun_ns: int, ended_ns: int) -> None:
        """Note that a bucket has run. ``place``: its place in the schedule, -1 if it was negotiated by itself."""

    def waited(self, since_ns: int, until_ns: int) -> None:
        """Note that a user's thread has waited for an operation."""

    def resumed(self, epoch: int, schedule: int, buckets: Sequence[Planned], start: int) -> None:
        """Note that ``schedule`` is replayed from now on, beginning with the bucket at place ``start``."""

    def frozen(self, epoch: int) -> None:
        """Note that no bucket of the schedule is launched any more."""

    def drained(self, epoch: int, begun_ns: int, valid: int, void: int) -> None:
        """Note that everything that any rank had launched has run.

        ``valid`` and ``void`` are the numbers of held buckets that turned out so.
        """

    def left(self, epoch: int) -> None:
        """Note that everything is negotiated from now on."""


class NoEvents:
    """Events to which nobody listens."""

    on = False

    def submitted(self, entries: Sequence[Submitted], together: bool) -> None: ...

    def decided(self, bucket: Bucket) -> None: ...

    def completed(self, ran: Bucket | Planned, place: int, begun_ns: int, ended_ns: int) -> None: ...

    def waited(self, since_ns: int, until_ns: int) -> None: ...

    def resumed(self, epoch: int, schedule: int, buckets: Sequence[Planned], start: int) -> None: ...

    def frozen(self, epoch: int) -> None: ...

    def drained(self, epoch: int, begun_ns: int, valid: int, void: int) -> None: ...

    def left(self, epoch: int) -> None: ...


NO_EVENTS: Events = NoEvents()
