"""The transport zmq: makes collectives of messages between pairs of ranks; each rank adds one shard."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import accumulate

from ddl_zmq.mailbox import Mailbox
from ddlcore.contracts.transport import DONE, Capabilities, Context, Memory, Transport, Work, dense, view
from ddlcore.errors import DeadlineExceeded, TransportError
from ddlcore.types import Buffer, ReduceOp

__all__ = ["ZmqTransport"]

NOTHING = memoryview(b"")


class ZmqTransport(Transport):
    """A transport for two ranks or more. It adds in the order of ranks, with the kernels that ddl passes to it."""

    capabilities = Capabilities(order_fixed=True)

    def __init__(self) -> None:
        self._mailbox: Mailbox | None = None
        self._aborted = False

    def open(self, context: Context) -> None:
        super().open(context)
        until_s = time.monotonic() + context.timeout_s
        mailbox = self._mailbox = Mailbox(context.rank, context.size, context.address or "127.0.0.1")
        if context.rank == 0:
            context.store.set("token", secrets.token_bytes(16))
        context.store.set(f"endpoint {context.rank}", mailbox.endpoint.encode())
        keys = ["token", *(f"endpoint {rank}" for rank in range(context.size))]
        token, *endpoints = [self._looked_up(key, until_s) for key in keys]
        mailbox.connect([endpoint.decode() for endpoint in endpoints], token)

    def _looked_up(self, key: str, until_s: float) -> bytes:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"zmq: {key} of {self.context.name} was not there in time")
        return self.context.store.get_checked(key, left_s, self._check_opening)

    def _check_opening(self) -> None:
        if self._aborted:
            raise TransportError(f"zmq: {self.context.name} was aborted while it was opened")

    def close(self) -> None:
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.close()

    def abort(self) -> None:
        self._aborted = True
        mailbox = self._mailbox
        if mailbox is not None:
            mailbox.aborted = True  # a waiting rank checks this ten times a second

    # --- collectives

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        dense(source, target)
        size = self.context.size
        bounds = [source.count * rank // size for rank in range(size + 1)]
        counts = [end - begin for begin, end in zip(bounds, bounds[1:])]  # noqa: RUF007  # pairwise says no more
        part = _part(target, bounds[self.context.rank], counts[self.context.rank])
        self.reducescatterv(source, part, counts, op)
        return self.allgatherv(part, target, counts)

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        dense(source, target)
        me, size = self.context.rank, self.context.size
        begins = [0, *accumulate(counts)]
        pieces = [_part(source, begin, count) for begin, count in zip(begins, counts)]
        for peer in self._peers():
            self._box.send(peer, _bytes(pieces[peer]))
        memory = Memory(target.nbytes * size)  # the shards of all ranks, by rank
        for rank in range(size):
            place = view(memory.address + rank * target.nbytes, target.nbytes)
            place[:] = _bytes(pieces[me]) if rank == me else self._box.receive(rank, target.nbytes)
        if target.count:
            addresses = [memory.address + rank * target.nbytes for rank in range(size)]
            self.context.kernels.reduce(addresses, target.address, target.count, target.dtype, op)
        return DONE

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        dense(source, target)
        me = self.context.rank
        mine = bytes(_bytes(source))  # source may be a part of target
        for peer in self._peers():
            self._box.send(peer, mine)
        begins = [0, *accumulate(counts)]
        for rank, (begin, count) in enumerate(zip(begins, counts)):
            place = _part(target, begin, count)
            _bytes(place)[:] = mine if rank == me else self._box.receive(rank, place.nbytes)
        return DONE

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        dense(buffer)
        if self.context.rank == root:
            for peer in self._peers():
                self._box.send(peer, _bytes(buffer))
        else:
            _bytes(buffer)[:] = self._box.receive(root, buffer.nbytes)
        return DONE

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        dense(source, target)
        me = self.context.rank
        given = [0, *accumulate(counts[me])]
        taken = [0, *accumulate(row[me] for row in counts)]
        for peer in self._peers():
            self._box.send(peer, _bytes(_part(source, given[peer], counts[me][peer])))
        own = _bytes(_part(source, given[me], counts[me][me]))
        for rank in range(self.context.size):
            place = _part(target, taken[rank], counts[rank][me])
            _bytes(place)[:] = own if rank == me else self._box.receive(rank, place.nbytes)
        return DONE

    def barrier(self) -> Work:
        for peer in self._peers():
            self._box.send(peer, NOTHING)
        for peer in self._peers():
            self._box.receive(peer, 0)
        return DONE

    @property
    def _box(self) -> Mailbox:
        if self._mailbox is None:
            raise TransportError("zmq: not open")
        return self._mailbox

    def _peers(self) -> list[int]:
        """Return the other ranks, beginning with the next one, so that not all ranks send to the same one first."""
        me, size = self.context.rank, self.context.size
        return [(me + step) % size for step in range(1, size)]


def _part(whole: Buffer, begin: int, count: int) -> Buffer:
    return Buffer(whole.address + begin * whole.dtype.itemsize, count, whole.dtype, (count,), owner=whole.owner)


def _bytes(buffer: Buffer) -> memoryview:
    return view(buffer.address, buffer.nbytes)
