"""One tensor's operation on this rank, from the call until its handle is done."""

from __future__ import annotations

from dataclasses import dataclass

from ddlcore.contracts.transport import Memory
from ddlcore.messages import Ask, Spec
from ddlcore.runtime.handle import Handle
from ddlcore.types import Buffer

__all__ = ["Entry", "Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a batch left for one entry. Kinds with a target of their own leave nothing here."""

    memory: Memory | None = None  # of kinds whose size is known only when all have asked
    rows: tuple[tuple[int, ...], ...] = ()  # ragged kinds: [member] = that member's rows
    digests: tuple[bytes, ...] = ()
    result: int = -1  # ADD_SET: the set's id; JOIN: the last rank


class Entry:
    """One ask and what it is about. ``slot`` is its place in its handle (grouped calls share one)."""

    __slots__ = ("digest", "handle", "name", "rows", "set_id", "slot", "source", "spec", "spec_bytes", "target")

    def __init__(
        self,
        handle: Handle,
        slot: int,
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
        self.slot = slot
        self.set_id = set_id
        self.name = name
        self.spec = spec
        self.spec_bytes = spec_bytes
        self.source = source
        self.target = target
        self.rows = rows
        self.digest = digest

    def ask(self, stamp: int) -> Ask:
        return Ask(self.set_id, self.name, self.spec_bytes, self.rows, stamp, self.digest)
