"""Combines several transports: for each kind of operation, one of them is used. Each has its own communicator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddlcore.contracts.store import PrefixStore
from ddlcore.contracts.transport import (
    Capabilities,
    Context,
    Memory,
    Move,
    Plan,
    Prepared,
    PreparedMove,
    Transport,
    Work,
)
from ddlcore.errors import TransportError
from ddlcore.types import Buffer, Kind, ReduceOp


class ByKindTransport(Transport):
    """A transport that runs no operation itself, but calls another transport for each kind of operation.

    ``kinds`` maps a kind to the transport that runs operations of this kind. ``default`` runs the operations of all
    kinds that are not in ``kinds``. One transport may be used for several kinds.

    ``capabilities`` are those of the transport for allreduce, except for three. ``one_host`` and ``thread_bound`` are
    true if they are true for at least one of the transports, and ``abort`` is true if it is true for all of them.
    ``capabilities_for`` returns the capabilities for one kind.
    """

    def __init__(self, default: Transport, kinds: Mapping[Kind, Transport]) -> None:
        self._default = default
        self._kinds = dict(kinds)
        self._all = list(dict.fromkeys([default, *kinds.values()]))
        self._begun: list[Transport] = []
        self._aborted = False
        every = [part.capabilities for part in self._all]
        self.capabilities = replace(
            self._of(Kind.ALLREDUCE).capabilities,
            one_host=any(one.one_host for one in every),
            thread_bound=any(one.thread_bound for one in every),
            abort=all(one.abort for one in every),
        )

    def capabilities_for(self, kind: Kind) -> Capabilities:
        return self._of(kind).capabilities

    def open(self, context: Context) -> None:
        super().open(context)
        for i, part in enumerate(self._all):
            if self._aborted:
                raise TransportError(f"{context.name} was aborted while it was opened")
            self._begun.append(part)
            part.open(replace(context, store=PrefixStore(f"kind{i}/", context.store)))

    def close(self) -> None:
        for part in self._begun:
            part.close()
        self._begun.clear()

    def abort(self) -> None:
        self._aborted = True
        for part in self._all:
            part.abort()

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        return self._of(Kind.ALLREDUCE).allreduce(source, target, op)

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        return self._of(Kind.ALLGATHER).allgatherv(source, target, counts)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        return self._of(Kind.BROADCAST).broadcast(buffer, root)

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        return self._of(Kind.REDUCESCATTER).reducescatterv(source, target, counts, op)

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        return self._of(Kind.ALLTOALL).alltoallv(source, target, counts)

    def barrier(self) -> Work:
        return self._of(Kind.BARRIER).barrier()

    def allocate(self, nbytes: int) -> Memory:
        return self._of(Kind.ALLREDUCE).allocate(nbytes)

    def prepare(self, plan: Plan) -> Prepared:
        return self._of(plan.kind).prepare(plan)

    def prepare_move(self, move: Move) -> PreparedMove:
        return self._of(move.kind).prepare_move(move)

    def _of(self, kind: Kind) -> Transport:
        return self._kinds.get(kind, self._default)
