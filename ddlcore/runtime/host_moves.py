"""Runs allgathers, broadcasts and alltoalls of tensors in host memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import prod

from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.memory import view
from ddlcore.contracts.transport import Memory
from ddlcore.errors import TransportError
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket
from ddlcore.runtime.delivery import Deliver
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.process_sets import Communicator
from ddlcore.runtime.request import Entry
from ddlcore.runtime.transport_calls import finish, new_memory
from ddlcore.types import Buffer, DType, Kind


class HostMoves:
    """Moves tensors in host memory between ranks. Only the thread that runs buckets uses this object."""

    def __init__(self, kernels: Kernels, meter: Meter) -> None:
        self._kernels = kernels
        self._meter = meter

    def rows(self, communicator: Communicator, kind: Kind, entry: Entry | None) -> tuple[tuple[int, ...], ...]:
        """Exchange the numbers of rows of a ragged tensor with the other ranks, and return the numbers of all ranks.

        Item [r] of the result is from rank r. It is (rows,) for an allgather, and the number of rows for each rank for
        an alltoall. A rank that takes part with dummy data has no ``entry`` and announces 0 rows. For other kinds of
        collectives, nothing is exchanged and the result is empty.
        """
        if not kind.is_ragged:
            return ()
        size, me = len(communicator.ranks), communicator.rank
        columns = size if kind is Kind.ALLTOALL else 1
        mine = entry.rows if entry is not None else (0,) * columns
        source = communicator.buffers.get("rows", columns, DType.I64)
        target = communicator.buffers.get("all rows", size * columns, DType.I64)
        view(source.address, source.nbytes)[:] = array("q", mine).tobytes()
        finish(communicator.transport.allgatherv(source, target, (columns,) * size))
        told = view(target.address, target.nbytes).cast("q").tolist()
        rows = tuple(tuple(told[r * columns : (r + 1) * columns]) for r in range(size))
        # The code below reads and writes as much memory as these numbers say, so they are checked first.
        if rows[me] != tuple(mine) or min(told) < 0:
            raise TransportError(f"the transport delivered wrong sizes: {rows} where this rank announced {mine}")
        return rows

    def allgather(
        self, communicator: Communicator, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        """Run the allgather ``bucket``, and return one outcome for each entry: the rows of all ranks.

        An entry is None if this rank takes part with dummy data.
        """
        outcomes: list[Outcome | None] = []
        for i, (entry, spec) in enumerate(zip(entries, specs)):
            row = prod(spec.shape)  # elements of one row
            counts = [rows[0] * row for rows in bucket.rows[i]]
            source = entry.source if entry is not None else new_memory(0, spec.dtype)
            assert source is not None
            target = new_memory(sum(counts), spec.dtype)
            finish(communicator.transport.allgatherv(source, target, counts))
            outcomes.append(_outcome(bucket, i, target))
        return outcomes

    def alltoall(
        self, communicator: Communicator, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        """Run the alltoall ``bucket``, and return one outcome for each entry: the rows that this rank has received.

        An entry is None if this rank takes part with dummy data.
        """
        outcomes: list[Outcome | None] = []
        for i, (entry, spec) in enumerate(zip(entries, specs)):
            row = prod(spec.shape)
            counts = [[rows * row for rows in sent] for sent in bucket.rows[i]]  # [from][to]
            source = entry.source if entry is not None else new_memory(0, spec.dtype)
            assert source is not None
            target = new_memory(sum(sent[communicator.rank] for sent in counts), spec.dtype)
            finish(communicator.transport.alltoallv(source, target, counts))
            outcomes.append(_outcome(bucket, i, target))
        return outcomes

    def broadcast(
        self, communicator: Communicator, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        """Run the negotiated broadcast ``bucket``, and return None for each entry: the results are in the targets.

        An entry is None if this rank has joined.
        """
        for entry, spec in zip(entries, specs):
            root = communicator.ranks.index(spec.root)
            target = entry.target if entry is not None else new_memory(prod(spec.shape), spec.dtype)
            assert target is not None
            if entry is not None and communicator.rank == root:
                self._copy(entry.source, target)
            finish(communicator.transport.broadcast(target, root))
        return [None] * len(entries)

    def replay_broadcast(self, communicator: Communicator, entry: Entry | None, spec: Spec, use: str) -> Deliver:
        """Run a broadcast of a schedule in transport memory, and return the function that delivers its result.

        ``use`` names the transport buffer. ``entry`` is None if this rank takes part with dummy data.
        """
        root = communicator.ranks.index(spec.root)
        copy = communicator.buffers.get(use, prod(spec.shape), spec.dtype)
        if entry is not None and communicator.rank == root:
            begun_ns = now_ns()
            self._copy(entry.source, copy)
            self._meter.pack_ns += now_ns() - begun_ns
        finish(communicator.transport.broadcast(copy, root))

        def deliver() -> list[Outcome | None]:
            if entry is not None:
                assert entry.target is not None
                begun_ns = now_ns()
                self._copy(copy, entry.target)
                self._meter.unpack_ns += now_ns() - begun_ns
            return [None]

        return deliver

    def _copy(self, source: Buffer | None, target: Buffer) -> None:
        if source is not None and source.address != target.address and source.count:
            self._kernels.pack([source.address], [source.count], source.dtype, target.address, source.dtype)


def _outcome(bucket: Bucket, i: int, target: Buffer) -> Outcome:
    assert isinstance(target.owner, Memory)
    digests = bucket.digests[i] if bucket.digests else ()
    return Outcome(target.owner, rows=bucket.rows[i], digests=digests, contributors=bucket.contributors)
