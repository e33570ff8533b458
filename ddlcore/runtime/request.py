"""Describes one tensor's operation on this rank, from the call until its handle is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddlcore.contracts.device import Event
from ddlcore.messages import Ask, Spec
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.waiter import Waiter
from ddlcore.types import Buffer

ANONYMOUS = "noname."  # begins the name of an unnamed call; alone, or directly before "[i]", it has no number yet

# The states of a persistent request.
IDLE = 0  # not in flight: the tensor is the user's
PENDING = 1  # in the tensor queue, or in a bucket of a schedule
DECIDED = 2  # in a negotiated bucket


class Entry:
    """One request for one tensor. ``number`` counts the entries of a handle, because a grouped call has several."""

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
        """Use other memory of the same layout; see contracts.framework.TensorEntry."""
        self.source, self.target = source, target

    def locate(self, address_of: Callable[[Any], int]) -> None:
        """Set each address to ``address_of(owner)``; see contracts.framework.TensorEntry."""
        for buffer in (self.source, self.target):
            if buffer is not None and buffer.owner is not None:
                buffer.address = address_of(buffer.owner)

    def ask(self) -> Ask:
        return Ask(self.set_id, self.name, self.spec_bytes, self.rows, self.stamp, self.digest)


class PersistentRequest(Entry):
    """An allreduce that is started anew in each step. It is entry and handle in one, and is described only once.

    ``TensorQueue.start_request`` starts it, and it is idle again when its tensor holds the result. It owns its buffer
    objects (usually one, since it works in place), which say where the tensor lies this time. ``starts`` counts how
    often it was started, and changes at the moment of the start, so that an interrupted caller can tell whether it was
    started. ``error`` stays until the next start, so that an interrupt cannot lose it.
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
        self.submitted = False  # as Handle.submitted, for ``submit``; ``starts`` is for ``start_request``
        self.error: BaseException | None = None
        self.how: Any = None  # free for the owner, to note what the request was made from
        self.index = -1  # the coordinator's index of the last bucket it was part of
        self.replay: Any = self  # the replay for which position and slot are valid
        self.position: Any = None
        self.slot = -1

    def set_target(self, address: int, owner: object) -> None:
        """Make the next starts write to this memory; see contracts.framework.PersistentRequest."""
        target = self.target
        target.address = address
        target.owner = owner

    def release_target(self) -> None:
        """Drop the owner of the target's memory, after the end of a start."""
        self.target.owner = None

    def mark_ready(self, event: int, stream: int, order: int) -> None:
        """Note the device event after which the tensor's values are complete; see Buffer.mark_ready."""
        source = self.source
        source.event = event
        source.stream = stream
        source.order = order

    def poll(self) -> bool:
        """Return whether ``wait`` would return or raise immediately."""
        self.waiter.polled(self.state != IDLE)
        if self.state != IDLE:
            return False
        self.completion.observe(self.index)
        return True

    def wait(self) -> None:
        """Wait until the tensor holds the result. Raises the operation's error if it failed, see Handle.wait."""
        if self.state != IDLE:
            self.waiter.wait(self)
        self.completion.observe(self.index)
        if self.error is not None:
            raise self.error.with_traceback(None)

    def arrive(self) -> Event | None:
        """Wait as ``wait`` does. Return None, because in host memory there is no event to order work after."""
        self.wait()
        return None

    def succeeded(self) -> bool:
        """Return whether a schedule's bucket has completed it, so that ``wait`` would do nothing but return."""
        return self.state == IDLE and self.error is None and self.index < 0

    @property
    def pending(self) -> bool:
        """Return whether the operation is in flight."""
        return self.state != IDLE

    def over(self) -> None:
        """Return None, see Handle.over: a persistent request has no function to call, because its user waits for it."""

    def pass_on(self, queue: Any) -> None:
        """Do nothing, because a persistent request has no function to call, see Handle.pass_on."""

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """Complete the operation. The caller holds the completion's lock and calls ``announce``."""
        self.index = index
        self.source.owner = None  # the tensor is the user's again
        self.state = IDLE

    def fail(self, error: BaseException) -> None:
        """End the operation with an error. The caller holds the completion's lock and calls ``announce``."""
        if self.state != IDLE:
            self.error = error
            self.source.owner = None
            self.state = IDLE
