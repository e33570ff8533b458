"""Defines the entry: the description of an operation on one tensor on this rank. It exists until the operation ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ddlcore.contracts.device import Event
from ddlcore.messages.spec import Ask, Spec
from ddlcore.messages.to_rank import Bucket
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.schedule import NOWHERE, Position
from ddlcore.runtime.waiter import Waiter
from ddlcore.types import Buffer

ANONYMOUS = "noname."  # begins the name of an unnamed call; alone, or directly before "[i]", it has no number yet

# The states of a persistent request.
IDLE = 0  # not in flight: the tensor is the user's
PENDING = 1  # in the tensor queue, or in a bucket of a schedule
DECIDED = 2  # in a negotiated bucket


class Entry:
    """A request of this rank for one tensor.

    ``number`` is the entry's position among the entries of its handle: a grouped call has one handle and several
    entries.
    """

    __slots__ = (
        "digest",
        "handle",
        "name",
        "number",
        "rows",
        "set_id",
        "source",
        "spec",
        "spec_bytes",
        "stamp",
        "target",
    )

    def __init__(
        self,
        handle: Handle | PersistentRequest,
        number: int,
        set_id: int,
        name: str,
        spec: Spec,
        spec_bytes: bytes,
        source: Buffer | None = None,
        target: Buffer | None = None,
        rows: tuple[int, ...] = (),
        digest: bytes = b"",
    ) -> None:
        self.handle = handle
        self.number = number
        self.set_id = set_id
        self.name = name
        self.spec = spec
        self.spec_bytes = spec_bytes
        self.source = source
        self.target = target
        self.rows = rows
        self.digest = digest
        self.stamp = -1  # the last bucket whose end the user's code had seen before this call

    def move(self, source: Buffer, target: Buffer | None) -> None:
        """Replace the memory of the tensor by other memory of the same layout; see contracts.framework.TensorEntry."""
        self.source, self.target = source, target

    def locate(self, address_of: Callable[[Any], int]) -> None:
        """Set the address of the source and of the target: each gets the address ``address_of(owner)`` of its owner.

        See contracts.framework.TensorEntry.
        """
        for buffer in (self.source, self.target):
            if buffer is not None and buffer.owner is not None:
                buffer.address = address_of(buffer.owner)

    @property
    def given(self) -> Entry | Given:
        """The tensors of the present call: its source, its target and its rows."""
        return self

    def ask(self) -> Ask:
        return Ask(self.set_id, self.name, self.spec_bytes, self.given.rows, self.stamp, self.digest)


class PersistentRequest(Entry):
    """An allreduce that is started anew in each step, and described only once. It is both entry and handle.

    ``Submission.start_request`` starts the request. The request is idle again when its tensor contains the result. The
    buffer objects ``source`` and ``target`` belong to the request, and say where the tensor is in memory in this step.
    They are usually the same object, because the request works in place. ``starts`` counts how often the request was
    started. This count changes exactly at the start, so a caller that was interrupted can see whether the request was
    started. ``error`` is kept until the next start, so that an interrupt cannot lose it.
    """

    __slots__ = (
        "completion",
        "error",
        "how",
        "index",
        "position",
        "replay",
        "slot",
        "starts",
        "state",
        "submitted",
        "user",
        "waiter",
    )

    source: Buffer
    target: Buffer

    def __init__(
        self,
        waiter: Waiter,
        set_id: int,
        name: str,
        spec: Spec,
        spec_bytes: bytes,
        source: Buffer,
        target: Buffer | None = None,
    ) -> None:
        super().__init__(self, 0, set_id, name, spec, spec_bytes, source, source if target is None else target)
        self.waiter = waiter
        self.completion = waiter.completion
        self.state = IDLE
        self.starts = 0
        self.user = 0  # the id of the thread that has made an unnamed call with it, and has not seen the end yet
        self.submitted = False  # as Handle.submitted, for ``submit``; ``starts`` is for ``start_request``
        self.error: BaseException | None = None
        self.how: Any = None  # the owner may store here what the request was made from
        self.index = -1  # the coordinator's index of the last bucket it was part of
        self.replay: object = self  # the replay for which position and slot are valid
        self.position: Position[Entry] = NOWHERE
        self.slot = -1

    def set_target(self, address: int, owner: object) -> None:
        """Set the memory for the result of the next starts: it is at ``address``, and ``owner`` keeps it alive.

        See contracts.framework.PersistentRequest.
        """
        target = self.target
        target.address = address
        target.owner = owner

    def release_target(self) -> None:
        """Drop the reference to the owner of the target's memory. This is called when the operation has ended."""
        self.target.owner = None

    def mark_ready(self, event: int, stream: int, order: int) -> None:
        """Record the device event after which the tensor's values are complete.

        See Buffer.mark_ready for the parameters.
        """
        source = self.source
        source.event = event
        source.stream = stream
        source.order = order

    def poll(self) -> bool:
        """Return whether the operation has ended, so that ``wait`` would not have to wait."""
        self.waiter.polled(self.state != IDLE)
        if self.state != IDLE:
            return False
        self.completion.observe(self.index)
        return True

    def wait(self) -> None:
        """Wait until the tensor contains the result. Raises the operation's error if it failed, see Handle.wait."""
        if self.state != IDLE:
            self.waiter.wait(self)
        self.completion.observe(self.index)
        if self.error is not None:
            raise self.error.with_traceback(None)

    def arrive(self) -> Event | None:
        """Wait as ``wait`` does, and return None, because the tensor is in host memory and has no event.

        For a tensor on a device, FencedPersistentRequest.arrive returns an event; later work must be ordered after that
        event.
        """
        self.wait()
        return None

    def succeeded(self) -> bool:
        """Return whether a bucket of a schedule has completed this request without an error.

        In that case the caller need not call ``wait``, because ``wait`` would only return.
        """
        return self.state == IDLE and self.error is None and self.index < 0

    @property
    def pending(self) -> bool:
        """Return whether the operation is in flight."""
        return self.state != IDLE

    def over(self) -> None:
        """Return None: unlike a Handle, a persistent request has no function that must be called at its end."""

    def pass_on(self, queue: Any) -> None:
        """Do nothing: unlike a Handle, a persistent request has no function that must be called at its end."""

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """Complete the operation. ``index`` is the coordinator's index of the bucket, or -1 in replay.

        ``number`` and ``outcome`` are not used. The caller holds the completion's lock and calls ``announce``
        afterwards.
        """
        self.index = index
        self.source.owner = None  # the tensor is the user's again
        self.state = IDLE

    def fail(self, error: BaseException) -> None:
        """End the operation with ``error`` if the operation is in flight.

        The caller holds the completion's lock and calls ``announce`` afterwards.
        """
        if self.state != IDLE:
            self.error = error
            self.source.owner = None
            self.state = IDLE


class Given:
    """What one blocking call has given to a persistent move, and what has become of it.

    If ``done`` is True, ``outcome`` is the outcome of this call. If the call has failed, ``error`` is its error.
    """

    __slots__ = ("done", "error", "outcome", "rows", "source", "target")

    def __init__(self, source: Buffer, target: Buffer | None, rows: tuple[int, ...]) -> None:
        self.source = source
        self.target = target
        self.rows = rows
        self.outcome: Any = None
        self.error: BaseException | None = None
        self.done = False


class PersistentMove(PersistentRequest):
    """A persistent request for a collective other than an allreduce, each time for another tensor of the same kind.

    The owner that is passed to a start is a Given, with the tensors of this start. It gets the outcome, because the next
    start may come, on another thread, before the caller has read the outcome.
    """

    __slots__ = ()

    @property
    def given(self) -> Given:
        given = self.source.owner
        assert isinstance(given, Given)
        return given

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """Complete the operation; see PersistentRequest.complete."""
        given = self.given
        given.outcome = outcome
        given.done = True
        self.index = index
        self.source.owner = None
        self.state = IDLE

    def fail(self, error: BaseException) -> None:
        """End the operation with ``error``; see PersistentRequest.fail."""
        if self.state != IDLE:
            self.given.error = error
            super().fail(error)


def brought(entries: Iterable[Entry | None]) -> int:
    """Return the size in bytes of this rank's tensors in a bucket.

    An entry that is None counts as 0: this rank has not submitted that tensor.
    """
    return sum(entry.spec.nbytes(entry.given.rows) for entry in entries if entry is not None)


Todo = tuple[Bucket, list[Entry | None]] | Callable[[], None]  # an item of the engine's queue: a bucket, or a function
