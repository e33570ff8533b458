"""The collectives across hosts that only move data, without reducing it.

Each byte is sent to a host only once, even if several ranks of that host need it. In a broadcast, several ranks of each
host (``Layout.shares``) send and receive data across hosts. In the other collectives, only the first rank of each host
sends and receives data across hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddl_shm.hierarchical.layout import part
from ddl_shm.hierarchical.pipeline import Pipeline, at
from ddlcore.contracts.transport import Transport, Work
from ddlcore.types import Buffer, DType


def barrier(pipe: Pipeline) -> None:
    """Run ``Transport.barrier`` for all ranks of all hosts."""

    def meet(i: int) -> None:
        pipe.here(pipe.local.barrier())

    def cross(transport: Transport, i: int) -> Work:
        return transport.barrier()

    pipe.stream(1, meet, cross if pipe.leads else None, meet)


def broadcast(pipe: Pipeline, buffer: Buffer, root: int) -> None:
    """Run ``Transport.broadcast`` for all ranks of all hosts.

    Each rank that exchanges data with other hosts sends or receives its share of the data.
    """
    layout = pipe.layout
    host, place = layout.places()[root]
    whole = _bytes(buffer)
    rounds = pipe.rounds(whole.count)

    def size(i: int) -> tuple[Buffer, list[int]]:
        chunk = at(whole, *part(whole.count, i, rounds))
        return chunk, layout.shared_out(chunk.count)

    def before(i: int) -> None:
        if host != layout.host:
            return
        chunk, shares = size(i)
        pipe.here(pipe.local.broadcast(chunk, place))
        mine = pipe.staging("share", i, shares[layout.local])
        begin = sum(shares[: layout.local])
        _pack(pipe, [at(chunk, begin, mine.count)], mine)

    def cross(transport: Transport, i: int) -> Work:
        return transport.broadcast(pipe.staging("share", i, size(i)[1][layout.local]), host)

    def after(i: int) -> None:
        if host != layout.host:
            chunk, shares = size(i)
            pipe.here(pipe.local.allgatherv(pipe.staging("share", i, shares[layout.local]), chunk, shares))

    pipe.stream(rounds, before, cross if layout.crosses else None, after)


def allgatherv(pipe: Pipeline, source: Buffer, target: Buffer, counts: Sequence[int]) -> None:
    """Run ``Transport.allgatherv`` for all ranks of all hosts.

    Each round moves the same fraction of every rank's bytes, so that all hosts send at the same time.
    """
    layout = pipe.layout
    lengths = [count * source.dtype.itemsize for count in counts]
    begins = [sum(lengths[:rank]) for rank in range(len(lengths))]
    rounds = pipe.rounds(sum(lengths))
    own, whole = _bytes(source), _bytes(target)
    rank = layout.mates[layout.local]

    def sizes(i: int) -> list[list[int]]:
        return [[part(lengths[r], i, rounds)[1] for r in ranks] for ranks in layout.hosts]

    def before(i: int) -> None:
        to_first = [[n] + [0] * (len(layout.mates) - 1) for n in sizes(i)[layout.host]]
        gathered = pipe.staging("gathered", i, sum(row[0] for row in to_first) if pipe.leads else 0)
        pipe.here(pipe.local.alltoallv(at(own, *part(own.count, i, rounds)), gathered, to_first))

    def cross(transport: Transport, i: int) -> Work:
        each = [sum(row) for row in sizes(i)]
        gathered, everything = pipe.staging("gathered", i, each[layout.host]), pipe.staging("all", i, sum(each))
        return transport.allgatherv(gathered, everything, each)

    def after(i: int) -> None:
        everything = pipe.staging("all", i, sum(map(sum, sizes(i))))
        pipe.here(pipe.local.broadcast(everything, 0))
        parts = [(begins[r], *part(lengths[r], i, rounds)) for ranks in layout.hosts for r in ranks]
        _unpack(pipe, everything, [at(whole, begin + offset, length) for begin, offset, length in parts])

    assert own.count == lengths[rank]
    pipe.stream(rounds, before, cross if pipe.leads else None, after)


def alltoallv(pipe: Pipeline, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> None:
    """Run ``Transport.alltoallv`` for all ranks of all hosts.

    Data for a rank of the same host goes directly to that rank. Data for a rank of another host goes through the first
    rank of the sender's host and the first rank of the receiver's host.
    """
    _Exchange(pipe, source, target, counts).run()


class _Exchange:
    """One run of alltoallv. In the code, ``s`` is a rank that sends, ``d`` a rank that receives, and ``g`` a host."""

    def __init__(self, pipe: Pipeline, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> None:
        size = source.dtype.itemsize
        self._pipe, self._layout = pipe, pipe.layout
        self._source, self._target = _bytes(source), _bytes(target)
        self._lengths = [[count * size for count in row] for row in counts]
        self._rank = self._layout.mates[self._layout.local]
        row = self._lengths[self._rank]
        column = [lengths[self._rank] for lengths in self._lengths]
        self._row_begins = [sum(row[:d]) for d in range(len(row))]
        self._column_begins = [sum(column[:s]) for s in range(len(column))]
        self._others = [ranks for g, ranks in enumerate(self._layout.hosts) if g != self._layout.host]
        self._rounds = pipe.rounds(max(self._through(ranks) for ranks in self._layout.hosts))

    def run(self) -> None:
        cross = self._cross if self._pipe.leads else None
        self._pipe.stream(self._rounds, self._before, cross, self._after)

    def _through(self, ranks: Sequence[int]) -> int:
        """Return the larger of two numbers: the bytes that ``ranks`` send, and the bytes that ``ranks`` receive.

        ``ranks`` are all ranks of one host. Both numbers include data that stays on this host.
        """
        received = sum(row[d] for row in self._lengths for d in ranks)
        return max(sum(sum(self._lengths[s]) for s in ranks), received)

    def _length(self, s: int, d: int, i: int) -> int:
        return part(self._lengths[s][d], i, self._rounds)[1]

    def _outgoing(self, d: int, i: int) -> Buffer:
        begin, length = part(self._lengths[self._rank][d], i, self._rounds)
        return at(self._source, self._row_begins[d] + begin, length)

    def _incoming(self, s: int, i: int) -> Buffer:
        begin, length = part(self._lengths[s][self._rank], i, self._rounds)
        return at(self._target, self._column_begins[s] + begin, length)

    def _abroad(self, rank: int, i: int, received: bool) -> int:
        """Return how many bytes ``rank`` receives from other hosts in round ``i``, or sends to them.

        The result is the number of received bytes if ``received`` is true, otherwise the number of sent bytes. ``rank``
        is a rank of this host.
        """
        others = [r for ranks in self._others for r in ranks]
        return sum(self._length(r, rank, i) if received else self._length(rank, r, i) for r in others)

    def _before(self, i: int) -> None:
        pipe, mates = self._pipe, self._layout.mates
        sent = pipe.staging("near out", i, sum(self._length(self._rank, d, i) for d in mates))
        _pack(pipe, [self._outgoing(d, i) for d in mates], sent)
        near = pipe.staging("near in", i, sum(self._length(s, self._rank, i) for s in mates))
        pipe.here(pipe.local.alltoallv(sent, near, [[self._length(s, d, i) for d in mates] for s in mates]))
        _unpack(pipe, near, [self._incoming(s, i) for s in mates])

        to_first = [[self._abroad(s, i, received=False)] + [0] * (len(mates) - 1) for s in mates]
        sent = pipe.staging("far out", i, to_first[self._layout.local][0])
        _pack(pipe, [self._outgoing(d, i) for ranks in self._others for d in ranks], sent)
        gathered = pipe.staging("gathered", i, sum(row[0] for row in to_first) if pipe.leads else 0)
        pipe.here(pipe.local.alltoallv(sent, gathered, to_first))
        if pipe.leads:  # gathered: sorted by sender, then by host; to be sent: sorted by host, then by sender
            pieces: dict[tuple[int, int], Buffer] = {}
            begin = 0
            for s in mates:
                for g, ranks in enumerate(self._others):
                    length = sum(self._length(s, d, i) for d in ranks)
                    pieces[g, s] = at(gathered, begin, length)
                    begin += length
            packed = pipe.staging("packed", i, gathered.count)
            _pack(pipe, [pieces[g, s] for g in range(len(self._others)) for s in mates], packed)

    def _cross(self, transport: Transport, i: int) -> Work:
        hosts = self._layout.hosts
        counts = [[0 if a is b else sum(self._length(s, d, i) for s in a for d in b) for b in hosts] for a in hosts]
        mine = self._layout.host
        sent, received = sum(counts[mine]), sum(row[mine] for row in counts)
        return transport.alltoallv(
            self._pipe.staging("packed", i, sent), self._pipe.staging("received", i, received), counts
        )

    def _after(self, i: int) -> None:
        pipe, mates = self._pipe, self._layout.mates
        senders = [s for ranks in self._others for s in ranks]
        from_first = [[self._abroad(d, i, received=True) for d in mates]]
        from_first += [[0] * len(mates)] * (len(mates) - 1)
        total = sum(from_first[0]) if pipe.leads else 0
        sorted_ = pipe.staging("sorted", i, total)
        if pipe.leads:  # received: sorted by sender, then by receiver; each receiver's part must be contiguous
            received = pipe.staging("received", i, total)
            pieces: dict[tuple[int, int], Buffer] = {}
            begin = 0
            for s in senders:
                for d in mates:
                    pieces[s, d] = at(received, begin, self._length(s, d, i))
                    begin += pieces[s, d].count
            _pack(pipe, [pieces[s, d] for d in mates for s in senders], sorted_)
        far = pipe.staging("far in", i, from_first[0][self._layout.local])
        pipe.here(pipe.local.alltoallv(sorted_, far, from_first))
        _unpack(pipe, far, [self._incoming(s, i) for s in senders])


def _bytes(buffer: Buffer) -> Buffer:
    return Buffer(buffer.address, buffer.nbytes, DType.U8, (buffer.nbytes,), owner=buffer.owner)


def _pack(pipe: Pipeline, pieces: Sequence[Buffer], target: Buffer) -> None:
    addresses, counts = [one.address for one in pieces], [one.count for one in pieces]
    pipe.kernels.pack(addresses, counts, DType.U8, target.address, DType.U8)


def _unpack(pipe: Pipeline, source: Buffer, pieces: Sequence[Buffer]) -> None:
    addresses, counts = [one.address for one in pieces], [one.count for one in pieces]
    pipe.kernels.unpack(source.address, DType.U8, addresses, counts, DType.U8)
