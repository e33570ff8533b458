"""Records, for one world, the tensors that some but not all ranks have requested, and the ranks that have joined.

This module decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ddlcore.contracts.fusion import Ready
from ddlcore.coordinator.pending_request import PendingRequest, bits_of, ranks_of
from ddlcore.coordinator.replay_controller import tensor_key
from ddlcore.messages.coding import decode_spec
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.spec import BY_SHARE, Ask, Spec
from ddlcore.runtime.checks import describe, mismatch_table
from ddlcore.runtime.periods import TensorKey
from ddlcore.types import Kind

MOST_SPECS = 16384  # how many decoded specs are kept at most


class RequestTable:
    """The pending requests, by process set and name, and the ranks that have joined.

    The requests are in the order in which the first rank has sent each of them.
    """

    def __init__(self) -> None:
        self.joined: dict[WorldRank, Ask] = {}  # by rank, in the order of joining
        self._joined_bits = 0  # the same ranks as bits
        self._pending: dict[tuple[int, str], PendingRequest] = {}
        self._members: dict[int, int] = {}  # by process set: its members as bits, filled when needed
        self._specs: dict[bytes, Spec] = {}
        self.find = self._pending.get  # by (set_id, name); bound once, for speed: thousands of asks per step

    def all(self) -> list[PendingRequest]:
        """Return all pending requests."""
        return list(self._pending.values())

    def open(self, ask: Ask, members: Sequence[WorldRank]) -> PendingRequest:
        """Return the pending request to which ``ask`` belongs. If there is none with this name, create a new one.

        ``members`` are the ranks that must send the request.
        """
        pending = self._pending.get((ask.set_id, ask.name))
        if pending is None:
            if self.spec(ask.spec).of_members:
                bits = bits_of(members)
            else:
                bits = self._members.get(ask.set_id) or self._members.setdefault(ask.set_id, bits_of(members))
            pending = self._pending[ask.set_id, ask.name] = PendingRequest(ask, bits)
        return pending

    def holds(self, pending: PendingRequest) -> bool:
        """Return whether ``pending`` is still in the table."""
        return self._pending.get((pending.set_id, pending.name)) is pending

    def take(self, pending: PendingRequest) -> None:
        """Remove ``pending`` from the table."""
        del self._pending[pending.set_id, pending.name]

    def clear(self) -> None:
        """Remove all pending requests. The ranks will send these requests again."""
        self._pending.clear()

    def removed(self, set_id: int) -> list[PendingRequest]:
        """Remove and return all pending requests of the process set ``set_id``, which has been removed."""
        self._members.pop(set_id, None)
        orphans = [pending for pending in self._pending.values() if pending.set_id == set_id]
        for pending in orphans:
            self.take(pending)
        return orphans

    # --- who has asked

    def join(self, rank: WorldRank, ask: Ask) -> list[PendingRequest]:
        """Record that ``rank`` has called ``join``. Return the pending requests that are complete now.

        From now on, the rank takes part in all collectives, with zeros.
        """
        self.joined.setdefault(rank, ask)
        self._joined_bits |= 1 << rank
        return self.complete()

    def none_joined(self) -> None:
        """Forget which ranks have joined. Each of them has returned from ``join``, or will send its request again."""
        self.joined.clear()
        self._joined_bits = 0

    def lacking(self, pending: PendingRequest) -> int:
        """Return the members that neither have the tensor ready nor have joined, as bits: bit r is set for rank r."""
        return pending.members & ~pending.asked & ~self._joined_bits

    def missing(self, pending: PendingRequest) -> list[WorldRank]:
        """Return, as a list of ranks, the members that neither have the tensor ready nor have joined."""
        return ranks_of(self.lacking(pending))

    def complete(self) -> list[PendingRequest]:
        """Return the pending requests that each member has sent, except for members that have joined."""
        return [pending for pending in self._pending.values() if not self.lacking(pending)]

    def rows(self, pending: PendingRequest, members: Sequence[WorldRank]) -> tuple[tuple[int, ...], ...]:
        """Return the ``rows`` of each member's Ask, in the order of the members; zeros for a member that has joined."""
        nothing = (0,) * len(pending.first.rows)
        asked = set(pending.ranks())
        return tuple(pending.ask_of(m).rows if m in asked else nothing for m in members)

    def digests(self, pending: PendingRequest, members: Sequence[WorldRank]) -> tuple[bytes, ...]:
        """Return the ``digest`` of each member's Ask, in the order of the members; b"" for a member that has joined."""
        asked = set(pending.ranks())
        return tuple(pending.ask_of(m).digest if m in asked else b"" for m in members)

    # --- what was asked for

    def spec(self, data: bytes) -> Spec:
        """Return the spec that is encoded in ``data``. Equal bytes are decoded only once.

        Raises msgspec.DecodeError if ``data`` is not a valid spec.
        """
        spec = self._specs.get(data)
        if spec is None:
            if len(self._specs) > MOST_SPECS:  # shapes that are never used again must not fill the memory
                self._specs.clear()
            spec = self._specs[data] = decode_spec(data)
        return spec

    def spec_of(self, pending: PendingRequest) -> Spec:
        """Return the spec of the Ask that arrived first for this tensor."""
        return self.spec(pending.spec)

    def key(self, pending: PendingRequest) -> TensorKey:
        """Return the key by which the tensor of ``pending`` is found in a schedule."""
        return tensor_key(pending.set_id, pending.name, pending.spec)

    def describe(self, pending: PendingRequest, compression: str) -> Ready:
        """Return a description of the tensor for the fusion policy. ``compression``: the value of the job's setting."""
        spec = self.spec_of(pending)
        compressor = spec.compressor_by(compression)
        # While ranks join, averages of other numbers of contributors are divided by other numbers.
        contributors = pending.asked.bit_count()
        key = (
            pending.set_id,
            spec.dtype,
            spec.op,
            spec.prescale,
            spec.postscale,
            spec.device,
            compressor,
            contributors,
        )
        group = f"{pending.set_id}.{_call(pending.name)}" if spec.group else None
        return Ready(pending.name, key, prod(spec.shape) * spec.dtype.itemsize, group=group)

    def objection(self, pending: PendingRequest) -> str:
        """Return why the operation of ``pending`` cannot run; "" if it can run."""
        if not pending.uniform:
            specs = {rank: self.spec(pending.ask_of(rank).spec) for rank in pending.ranks()}
            return mismatch_table(pending.name, pending.set_id, specs)
        spec = self.spec_of(pending)
        if spec.kind is Kind.BROADCAST and spec.root in self.joined and not pending.asked >> spec.root & 1:
            return (
                f"broadcast {describe([pending.name], pending.set_id)}: its root, rank {spec.root}, has joined; "
                "choose another root"
            )
        if spec.part_of == BY_SHARE and pending.asked != pending.members:
            absent = ranks_of(pending.members & ~pending.asked)
            return (
                f"allreduce {describe([pending.name], pending.set_id)}: rank {', '.join(map(str, absent))} has joined, so "
                "the shares of the other ranks do not add up to 1; pass plain numbers as weights, or let all ranks make "
                "equally many calls"
            )
        return ""

    # --- grouped calls

    def are_mates(self, one: PendingRequest, other: PendingRequest) -> bool:
        """Return whether the requests ``one`` and ``other`` belong to the same grouped call."""
        return _same_call(one, other) and all(self.spec_of(pending).group for pending in (one, other))

    def call_of(self, pending: PendingRequest) -> object:
        """Return an object that identifies the grouped call of ``pending``: it is equal for all tensors of that call.

        If ``pending`` does not belong to a grouped call, return ``pending`` itself.
        """
        return (pending.set_id, _call(pending.name)) if pending.is_grouped(self.spec) else pending

    def complete_group(self, pending: PendingRequest) -> list[PendingRequest]:
        """Return the requests that may run now. This is called when ``pending`` is complete.

        If ``pending`` does not belong to a grouped call, only ``pending`` may run. Otherwise all requests of the
        grouped call may run together, or none if one of them is not complete. The tensors of the call need not be
        counted, because a rank sends them all in one Request, except for tensors that are in a schedule.
        """
        if not self.spec_of(pending).group:
            return [pending]
        mates = [other for other in self._pending.values() if _same_call(other, pending) and self.spec_of(other).group]
        return [] if any(self.lacking(mate) for mate in mates) else mates

    def is_torn(self, pending: PendingRequest) -> bool:
        """Return whether the grouped call of ``pending`` is torn: some of its tensors are in slots of the schedule.

        The other tensors of such a call are pending here. The call must be decided as a whole, in negotiation. Return
        False if ``pending`` does not belong to a grouped call.
        """
        if not pending.is_grouped(self.spec):
            return False
        mates = sum(_same_call(other, pending) for other in self._pending.values())
        return mates < max(self.spec(pending.ask_of(rank).spec).group for rank in pending.ranks())

    def doom(self, pending: PendingRequest) -> list[PendingRequest]:
        """Remove ``pending`` and all other requests of its grouped call. Return the removed requests.

        The tensors of a grouped call fail together.
        """
        doomed = [pending]
        if pending.is_grouped(self.spec):
            doomed += [
                other
                for other in self._pending.values()
                if other is not pending and _same_call(other, pending) and other.is_grouped(self.spec)
            ]
        doomed = [one for one in doomed if self._pending.get((one.set_id, one.name)) is not None]
        for one in doomed:
            self.take(one)
        return doomed


def _call(name: str) -> str:
    """Return the name of a tensor's grouped call. A tensor ``<call>[<i>]`` belongs to the grouped call ``<call>``."""
    return name.rpartition("[")[0]


def _same_call(one: PendingRequest, other: PendingRequest) -> bool:
    return one.set_id == other.set_id and _call(one.name) == _call(other.name)
