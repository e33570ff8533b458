"""One tensor's operation on this rank, from the call until its handle is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddlcore.contracts.device import Event
from ddlcore.contracts.transport import Memory
from ddlcore.messages import Ask, Spec
from ddlcore.runtime.handle import Completion, Handle
from ddlcore.types import Buffer

__all__ = ["ANONYMOUS", "DECIDED", "IDLE", "PENDING", "Entry", "Outcome", "PersistentRequest"]

ANONYMOUS = "noname."  # what names begin with that nobody has given; alone (or before "[i]"), still to be numbered

# Where a persistent request is.
IDLE = 0  # with the user
PENDING = 1  # in the tensor queue, or in a bucket of a schedule
DECIDED = 2  # in a bucket that was negotiated


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a bucket left for one entry. Kinds with a target of their own leave nothing here."""

    memory: Memory | None = None  # of kinds whose size is known only when all have asked
    rows: tuple[tuple[int, ...], ...] = ()  # ragged kinds: [member] = that member's rows
    digests: tuple[bytes, ...] = ()
    result: int = -1  # ADD_SET: the set's id; JOIN: the last rank
    event: Event | None = None  # behind which the values stand, where they lie on a device


class Entry:
    """One ask and what it is about. ``number`` counts the entries of its handle: a grouped call has several."""

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
        self.stamp = -1  # the last bucket that the user's code had seen end when it made this call

    def ask(self) -> Ask:
        return Ask(self.set_id, self.name, self.spec_bytes, self.rows, self.stamp, self.digest)


class PersistentRequest(Entry):
    """An allreduce that comes again in every step: entry and handle in one, described once.

    ``TensorQueue.start_request`` starts it; it is idle again when its result stands. Its buffers are its own (one, in place)
    and tell where the tensor lies this time. ``starts`` counts, in the same moment, how often it was started: whoever
    was interrupted meanwhile can tell. ``error`` stays until the next start, so that no interrupt loses it.
    """

    __slots__ = ("completion", "error", "how", "index", "position", "replay", "slot", "starts", "state", "submitted")

    source: Buffer
    target: Buffer

    def __init__(
        self,
        completion: Completion,
        set_id: int,
        name: str,
        spec: Spec,
        spec_bytes: bytes,
        source: Buffer,
        target: Buffer | None = None,
    ) -> None:
        super().__init__(self, 0, set_id, name, spec, spec_bytes, source, source if target is None else target)
        self.completion = completion
        self.state = IDLE
        self.starts = 0
        self.submitted = False  # as Handle.submitted; ``starts`` says it of ``TensorQueue.start_request``
        self.error: BaseException | None = None
        self.how: Any = None  # whoever keeps it may say what it was made from
        self.index = -1  # of the bucket it was part of last, as the coordinator counts
        self.replay: Any = self  # whose slot it has: position and slot hold for no other
        self.position: Any = None
        self.slot = -1

    def poll(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        self.completion.polled(self.state != IDLE)
        if self.state != IDLE:
            return False
        self.completion.observe(self.index)
        return True

    def wait(self) -> None:
        """Returns when the tensor holds the result; raises what became of the operation otherwise, see Handle.wait."""
        if self.state != IDLE:
            self.completion.wait(self)
        self.completion.observe(self.index)
        if self.error is not None:
            raise self.error.with_traceback(None)

    @property
    def pending(self) -> bool:
        """Whether it is under way."""
        return self.state != IDLE

    def over(self) -> None:
        """As Handle.over: whoever starts one waits for it, so nobody is to be called."""

    def pass_on(self, queue: Any) -> None:
        """As Handle.pass_on: nobody is to be called."""

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """The caller holds the completion's lock, and announces."""
        self.index = index
        self.source.owner = None  # the tensor is the user's again
        self.state = IDLE

    def fail(self, error: BaseException) -> None:
        """The operation is over, with an error. As ``complete``."""
        if self.state != IDLE:
            self.error = error
            self.source.owner = None
            self.state = IDLE
