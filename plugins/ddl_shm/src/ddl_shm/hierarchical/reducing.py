"""The collectives across hosts that reduce data. Their results are the same to the last bit in every run.

The values are added on each host in the order of its ranks; then the sums of the hosts are added in the order of the
hosts. 16-bit floats are added in float32. Their sums are rounded twice: once on each host, and once across hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddl_shm.hierarchical.layout import part, split
from ddl_shm.hierarchical.pipeline import Pipeline, at
from ddlcore.contracts.transport import DONE, Transport, Work
from ddlcore.types import Buffer, DType, ReduceOp

SMALL_BYTES = 16 << 10  # up to this size, every host gets the other hosts' whole sums: one step across, not two


def allreduce(pipe: Pipeline, source: Buffer, target: Buffer, op: ReduceOp) -> None:
    """Run ``Transport.allreduce`` for all ranks of all hosts.

    If there are H hosts and the tensor has N bytes, each host sends 2 N (H - 1) / H bytes to other hosts, as many as in
    a ring. A small tensor on more than two hosts is an exception: each host sends more bytes, but in fewer steps.
    """
    layout, dtype = pipe.layout, source.dtype
    rounds = pipe.rounds(source.nbytes)
    hosts = len(layout.hosts)

    def size(i: int) -> tuple[int, int, list[int]]:
        begin, count = part(source.count, i, rounds)
        return begin, count, layout.shared_out(count)

    def before(i: int) -> None:
        begin, count, shares = size(i)
        mine = pipe.staging("sum", i, shares[layout.local], dtype)
        pipe.here(pipe.local.reducescatterv(at(source, begin, count), mine, shares, op))

    def others(i: int, count: int) -> Buffer:
        """Return the staging memory for the sums of the other hosts in round ``i``: ``count`` elements for each host.

        With more than two hosts, this memory also has room for this host's sums.
        """
        return pipe.staging("sums", i, (hosts if hosts > 2 else 1) * count, dtype)

    def exchange(transport: Transport, i: int) -> Work:
        """Send this host's sums to all other hosts, and receive theirs: for two hosts, and for small tensors."""
        count = size(i)[2][layout.local]
        mine, sums = _bytes(pipe.staging("sum", i, count, dtype)), _bytes(others(i, count))
        if hosts > 2:
            return transport.allgatherv(mine, sums, [mine.count] * hosts)
        return transport.alltoallv(mine, sums, [[0, mine.count], [mine.count, 0]])

    def by_shards(transport: Transport, i: int) -> Work:
        """Let each host add one shard of the sums of all hosts, and send the result to all other hosts.

        With more than two hosts, this step sends fewer bytes than ``exchange``.
        """
        count = size(i)[2][layout.local]
        mine, total = pipe.staging("sum", i, count, dtype), pipe.staging("total", i, count, dtype)
        shards = split(count, hosts)
        shard = shards[layout.host]
        gathered, added = pipe.staging("sums", i, hosts * shard, dtype), pipe.staging("shard", i, shard, dtype)
        nbytes = [n * dtype.itemsize for n in shards]
        _finish(pipe, transport.alltoallv(_bytes(mine), _bytes(gathered), [nbytes] * hosts))
        _reduce(pipe, [at(gathered, h * shard, shard) for h in range(hosts)], added, op)
        return transport.allgatherv(_bytes(added), _bytes(total), nbytes)

    directly = hosts == 2 or source.nbytes <= SMALL_BYTES

    def after(i: int) -> None:
        begin, count, shares = size(i)
        own = shares[layout.local]
        total = pipe.staging("total", i, own, dtype)
        if directly and layout.crosses:
            sums = others(i, own)
            parts = [at(sums, h * own, own) for h in range(hosts)] if hosts > 2 else [sums, sums]
            parts[layout.host] = pipe.staging("sum", i, own, dtype)
            _reduce(pipe, parts, total, op)
        pipe.here(pipe.local.allgatherv(total, at(target, begin, count), shares))

    pipe.stream(rounds, before, (exchange if directly else by_shards) if layout.crosses else None, after)


def reducescatterv(pipe: Pipeline, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> None:
    """Run ``Transport.reducescatterv`` for all ranks of all hosts.

    On each host, the first rank gets the sums of this host. The first ranks of all hosts exchange these sums: each
    first rank receives only the parts of the result that belong to ranks of its own host.
    """
    layout, dtype = pipe.layout, source.dtype
    rounds = pipe.rounds(source.nbytes)
    ordered = [rank for ranks in layout.hosts for rank in ranks]
    begins = [sum(counts[:rank]) for rank in range(len(counts))]

    def sizes(i: int) -> list[list[int]]:
        return [[part(counts[rank], i, rounds)[1] for rank in ranks] for ranks in layout.hosts]

    def before(i: int) -> None:
        parts = [part(counts[rank], i, rounds) for rank in ordered]
        addresses = [source.address + (begins[r] + begin) * dtype.itemsize for r, (begin, _) in zip(ordered, parts)]
        lengths = [length for _, length in parts]
        packed = pipe.staging("packed", i, sum(lengths), dtype)
        pipe.kernels.pack(addresses, lengths, dtype, packed.address, dtype)
        to_first = [packed.count] + [0] * (len(layout.mates) - 1)
        mine = pipe.staging("sum", i, to_first[layout.local], dtype)
        pipe.here(pipe.local.reducescatterv(packed, mine, to_first, op))

    def cross(transport: Transport, i: int) -> Work:
        each = [sum(lengths) for lengths in sizes(i)]
        own = each[layout.host]
        mine, sums = pipe.staging("sum", i, sum(each), dtype), pipe.staging("sums", i, len(each) * own, dtype)
        return transport.alltoallv(_bytes(mine), _bytes(sums), [[n * dtype.itemsize for n in each]] * len(each))

    def after(i: int) -> None:
        lengths = sizes(i)[layout.host]
        own, hosts = sum(lengths), len(layout.hosts)
        total = pipe.staging("total", i, own if pipe.leads else 0, dtype)
        if pipe.leads:
            sums = pipe.staging("sums", i, hosts * own, dtype)
            _reduce(pipe, [at(sums, h * own, own) for h in range(hosts)], total, op)
        rank = layout.mates[layout.local]
        from_first = [lengths] + [[0] * len(lengths)] * (len(lengths) - 1)
        pipe.here(pipe.local.alltoallv(total, at(target, *part(counts[rank], i, rounds)), from_first))

    pipe.stream(rounds, before, cross if pipe.leads else None, after)


def _reduce(pipe: Pipeline, sources: Sequence[Buffer], target: Buffer, op: ReduceOp) -> None:
    pipe.kernels.reduce([one.address for one in sources], target.address, target.count, target.dtype, op)


def _bytes(buffer: Buffer) -> Buffer:
    """Return the memory of ``buffer`` as a buffer of bytes.

    Bytes are used because the transport across hosts may not support the element type.
    """
    return Buffer(buffer.address, buffer.nbytes, DType.U8, (buffer.nbytes,), owner=buffer.owner)


def _finish(pipe: Pipeline, work: Work) -> None:
    if work is not DONE:
        pipe.here(work)
