"""Defines the calls by which a rank's operations are reported to the timeline, or to any other listener."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ddlcore.messages.to_rank import Bucket, Planned


class Submitted(Protocol):
    """Those attributes of a submitted operation that a listener may read."""

    set_id: int
    name: str
    spec_bytes: bytes


class Events(Protocol):
    """A listener for the events of one rank's operations. Each method is called on the thread where the event happens.

    The methods must return soon, must take no lock of ddl, and must not raise. A call takes about 50 ns. A caller for
    which this is too much per bucket checks ``on`` first.
    """

    @property
    def on(self) -> bool:
        """Return whether the events are used, for example written to a timeline.

        This value may change at any moment, so the other methods may be called even while it is False.
        """

    def submitted(self, entries: Sequence[Submitted], together: bool) -> None:
        """Record that a user thread is about to submit ``entries``.

        ``together`` is True if the entries are persistent requests.
        """

    def decided(self, bucket: Bucket) -> None:
        """Record that the coordinator has decided on ``bucket``."""

    def completed(self, ran: Bucket | Planned, place: int, begun_ns: int, ended_ns: int) -> None:
        """Record that the bucket ``ran`` has run, from ``begun_ns`` to ``ended_ns``.

        ``place`` is the bucket's place in the schedule, or -1 if the bucket did not belong to a schedule.
        """

    def waited(self, since_ns: int, until_ns: int) -> None:
        """Record that a user thread has waited for an operation from ``since_ns`` to ``until_ns``."""

    def resumed(self, epoch: int, schedule: int, buckets: Sequence[Planned], start: int) -> None:
        """Record that the schedule with the number ``schedule`` is replayed from now on, in ``epoch``.

        ``buckets`` are the buckets of the schedule. Replay begins with the bucket at place ``start``.
        """

    def frozen(self, epoch: int) -> None:
        """Record that a freeze has begun: this rank launches no more buckets of the schedule in ``epoch``."""

    def drained(self, epoch: int, begun_ns: int, valid: int, void: int) -> None:
        """Record that this rank has run all buckets that any rank had launched before the freeze.

        ``begun_ns`` is the time at which this drain began. Some buckets had been kept until it was known whether they
        are valid: ``valid`` is the number of them that were valid, and ``void`` is the number that were void.
        """

    def left(self, epoch: int) -> None:
        """Record that replay has ended: from now on, in ``epoch``, all tensors are negotiated."""


class NoEvents:
    """A listener that ignores all events."""

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
