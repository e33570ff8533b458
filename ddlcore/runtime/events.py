"""Defines what the parts of a rank report on its operations, for the timeline. It does not know who listens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ddlcore.messages import Bucket, Planned


class Submitted(Protocol):
    """The attributes of a submitted operation that a listener may read."""

    set_id: int
    name: str
    spec_bytes: bytes


class Events(Protocol):
    """An object that is told what happens to the operations of one rank, on the thread on which it happens.

    Its methods must return soon, take no lock of ddl, and not raise. A call takes about 50 ns; callers for which that
    is too much for each bucket check ``on`` first.
    """

    @property
    def on(self) -> bool:
        """Return whether anybody listens.

        It may change at any moment, so the other methods may be called even while it is False.
        """

    def submitted(self, entries: Sequence[Submitted], together: bool) -> None:
        """Record that a user thread is about to submit ``entries``. ``together``: they are persistent requests."""

    def decided(self, bucket: Bucket) -> None:
        """Record that the coordinator has decided on ``bucket``."""

    def completed(self, ran: Bucket | Planned, place: int, begun_ns: int, ended_ns: int) -> None:
        """Record that a bucket has run. ``place`` is its place in the schedule; -1 if it was negotiated by itself."""

    def waited(self, since_ns: int, until_ns: int) -> None:
        """Record that a user thread has waited for an operation from ``since_ns`` to ``until_ns``."""

    def resumed(self, epoch: int, schedule: int, buckets: Sequence[Planned], start: int) -> None:
        """Record that ``schedule`` is replayed from now on, beginning with the bucket at place ``start``."""

    def frozen(self, epoch: int) -> None:
        """Record that this rank launches no bucket of the schedule any more."""

    def drained(self, epoch: int, begun_ns: int, valid: int, void: int) -> None:
        """Record that this rank has run everything that any rank had launched before the freeze.

        Of the buckets that this rank held, ``valid`` were valid and ``void`` were void.
        """

    def left(self, epoch: int) -> None:
        """Record that all tensors are negotiated from now on, in ``epoch``."""


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
