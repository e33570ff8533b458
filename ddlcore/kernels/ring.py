"""Allreduce over the channels, for numba: one bucket from the first chunk to the last, without the GIL.

Elements meet in rank order, whatever the chunks; source and target may be the same memory, since a rank
overwrites a chunk only after it has published it. Entry is all or nothing: with its first chunk a rank says
whether it comes without data (``idle``); if anybody does, all go through the rounds and nobody writes to a
tensor. Imported only while compiling. Arguments are int64.
"""

from __future__ import annotations

from ddlcore.kernels.bucket import ITEMSIZE
from ddlcore.kernels.channels import (
    INPUT,
    LATER,
    RESULT,
    aborted,
    anybody_idle,
    enter,
    next_round,
    publish,
    reserve,
    result,
    slot,
    wait_a_while,
    wait_all,
)
from ddlcore.kernels.code import FUNCTIONS
from ddlcore.kernels.frame import (
    BEGUN,
    BEGUN_OFFSET,
    BEGUN_TENSOR,
    CHUNK,
    CODE,
    COUNTS,
    DTYPE,
    FINISHED,
    FRAME,
    IN_USED,
    OP,
    POSTSCALE,
    PRESCALE,
    RANK,
    SIZE,
    SMALL,
    SOURCES,
    TABLE,
    TARGETS,
    TICKET,
    TOTAL,
)
from ddlcore.kernels.intrinsics import compiled, copy, outside, read, read_double, write

__all__ = ["VOID", "ddl_allreduce", "ddl_allreduce_idle", "ddl_allreduce_try"]

_reduce = outside("ddl_reduce")

CACHE_LINE = 64
SLEEPS = 2  # of SLEEP_NS each: how long one try waits
VOID = 3  # somebody came without data: nothing was written


# --- a bucket of tensors as one run of elements: (tensor, offset) is a place in it


@compiled("qqqqqqq", "qq")
def _copy_pieces(
    plan: int, addresses: int, tensor: int, offset: int, flat: int, count: int, outwards: int
) -> tuple[int, int]:
    """Copies ``count`` elements into ``flat`` (0) or back (1), or passes over them (-1); returns the place behind them."""
    size = ITEMSIZE[read(plan + DTYPE)]
    while count > 0:
        n = min(count, read(plan + COUNTS + 8 * tensor) - offset)
        address = read(addresses + 8 * tensor) + offset * size
        if outwards > 0:
            copy(address, flat, n * size)
        elif outwards == 0:
            copy(flat, address, n * size)
        flat += n * size
        count -= n
        offset += n
        if offset == read(plan + COUNTS + 8 * tensor):
            tensor += 1
            offset = 0
    return tensor, offset


@compiled("qqqqqqq", "")
def _reduce_slots(frame: int, plan: int, round_: int, offset: int, own: int, target: int, count: int) -> None:
    """Reduces ``count`` elements that lie ``offset`` bytes within every rank's slot; this rank's own at ``own``."""
    rank, size = read(frame + RANK), read(frame + SIZE)
    for r in range(size):
        write(frame + TABLE + 8 * r, own if r == rank else slot(frame, r, round_) + offset)
    prescale, scale = read_double(plan + PRESCALE), read_double(plan + POSTSCALE)
    _reduce(frame + TABLE, size, target, count, read(plan + DTYPE), read(plan + OP), prescale, scale)


@compiled("qqqqqqqq", "qq")
def _reduce_pieces(
    frame: int, plan: int, sources: int, targets: int, tensor: int, offset: int, round_: int, count: int
) -> tuple[int, int]:
    """Reduces the chunk in the slots straight into the tensors; returns the place behind it."""
    size = ITEMSIZE[read(plan + DTYPE)]
    done = 0
    while done < count:
        n = min(count - done, read(plan + COUNTS + 8 * tensor) - offset)
        own = read(sources + 8 * tensor) + offset * size
        target = read(targets + 8 * tensor) + offset * size
        if n > 0:
            _reduce_slots(frame, plan, round_, done * size, own, target, n)
        done += n
        offset += n
        if offset == read(plan + COUNTS + 8 * tensor):
            tensor += 1
            offset = 0
    return tensor, offset


# --- allreduce


@compiled("qqqqq")
def _all_here(frame: int, first: int, tensor: int, offset: int, sleeps: int) -> int:
    """Waits a while for all to have published round ``first``; LATER: notes how far this rank is, to go on from there."""
    code = wait_a_while(frame, INPUT, first + 1, sleeps)
    write(frame + BEGUN, 1 if code == LATER else 0)
    write(frame + BEGUN_TENSOR, tensor)
    write(frame + BEGUN_OFFSET, offset)
    return code


@compiled("qqq", "qq")
def _shard(frame: int, plan: int, n: int) -> tuple[int, int]:
    """Where this rank's part of a chunk of ``n`` elements begins and ends: two ranks never write one cache line."""
    rank, size = read(frame + RANK), read(frame + SIZE)
    line = CACHE_LINE // ITEMSIZE[read(plan + DTYPE)]
    shard = ((n + size - 1) // size + line - 1) // line * line
    begin = min(n, rank * shard)
    return begin, min(n, begin + shard)


@compiled("qqqqqqqq", "qq")
def _copy_others(
    frame: int, plan: int, addresses: int, tensor: int, offset: int, flat: int, n: int, outwards: int
) -> tuple[int, int]:
    """As ``_copy_pieces`` for a chunk of ``n`` elements, but for this rank's own part: nobody else needs that."""
    size = ITEMSIZE[read(plan + DTYPE)]
    begin, end = _shard(frame, plan, n)
    tensor, offset = _copy_pieces(plan, addresses, tensor, offset, flat, begin, outwards)
    tensor, offset = _copy_pieces(plan, addresses, tensor, offset, 0, end - begin, -1)
    return _copy_pieces(plan, addresses, tensor, offset, flat + end * size, n - end, outwards)


@compiled("qqqqqqqqq", "qqq")
def _publish(
    frame: int, plan: int, i: int, n: int, tensor: int, offset: int, whole: int, idle: int, sleeps: int
) -> tuple[int, int, int]:
    """Shows chunk ``i`` of ``n`` elements, which begins at (tensor, offset); (code, the place behind it).

    ``whole`` 0: but for this rank's own part. The first chunk is the entry: with ``sleeps`` it waits a while for all.
    """
    first = read(frame + IN_USED)
    if i == 0 and read(frame + BEGUN) != 0:
        tensor, offset = read(frame + BEGUN_TENSOR), read(frame + BEGUN_OFFSET)
    else:
        code = reserve(frame, INPUT, first + i, n * ITEMSIZE[read(plan + DTYPE)])
        if i == 0 and code == 0:
            code = enter(frame, first, idle)
        if code != 0:
            return code, tensor, offset
        if idle == 0:
            sources, place = read(plan + SOURCES), slot(frame, read(frame + RANK), first + i)
            if whole != 0:
                tensor, offset = _copy_pieces(plan, sources, tensor, offset, place, n, 0)
            else:
                tensor, offset = _copy_others(frame, plan, sources, tensor, offset, place, n, 0)
        publish(frame, INPUT)
    if i == 0 and sleeps != 0:
        return _all_here(frame, first, tensor, offset, sleeps), tensor, offset
    return 0, tensor, offset


@compiled("qqqqq")
def _allreduce_directly(frame: int, plan: int, chunk: int, idle: int, sleeps: int) -> int:
    """Every rank reads every peer's slots and reduces all: best for two ranks, and for few bytes."""
    sources, targets = read(plan + SOURCES), read(plan + TARGETS)
    total = read(plan + TOTAL)
    chunks = (total + chunk - 1) // chunk
    first = read(frame + IN_USED)
    out_tensor = out_offset = in_tensor = in_offset = void = code = 0
    for i in range(chunks + 1):
        if i < chunks:
            n = min(chunk, total - i * chunk)
            code, out_tensor, out_offset = _publish(frame, plan, i, n, out_tensor, out_offset, 1, idle, sleeps)
            if code != 0:
                return code
        j = i - 1
        if 0 <= j < chunks:
            code = wait_all(frame, INPUT, first + j + 1)
            if code != 0:
                return code
            if j == 0:
                void = anybody_idle(frame, first)
            if void == 0:
                n = min(chunk, total - j * chunk)
                in_tensor, in_offset = _reduce_pieces(frame, plan, sources, targets, in_tensor, in_offset, first + j, n)
    next_round(frame, INPUT, chunks)
    return VOID if void != 0 else 0


@compiled("qqqqqqq", "qq")
def _reduce_shard(
    frame: int, plan: int, tensor: int, offset: int, round_: int, result_round: int, n: int
) -> tuple[int, int]:
    """Reduces this rank's part of a chunk of ``n`` elements into the slot of results that all share, and its own tensors.

    The chunk begins at (tensor, offset); returned is the place behind it.
    """
    sources, targets = read(plan + SOURCES), read(plan + TARGETS)
    size = ITEMSIZE[read(plan + DTYPE)]
    begin, end = _shard(frame, plan, n)
    tensor, offset = _copy_pieces(plan, sources, tensor, offset, 0, begin, -1)
    done = begin
    while done < end:
        count = min(end - done, read(plan + COUNTS + 8 * tensor) - offset)
        if count > 0:
            own = read(sources + 8 * tensor) + offset * size
            place = result(frame, result_round) + done * size
            _reduce_slots(frame, plan, round_, done * size, own, place, count)
            copy(read(targets + 8 * tensor) + offset * size, place, count * size)
        done += count
        offset += count
        if offset == read(plan + COUNTS + 8 * tensor):
            tensor += 1
            offset = 0
    return _copy_pieces(plan, sources, tensor, offset, 0, n - end, -1)


@compiled("qqqqq")
def _allreduce_by_shards(frame: int, plan: int, chunk: int, idle: int, sleeps: int) -> int:
    """Each rank reduces its part of every chunk, then gathers the others': three steps, each a chunk behind the last."""
    targets, total = read(plan + TARGETS), read(plan + TOTAL)
    chunks = (total + chunk - 1) // chunk
    first, first_result = read(frame + IN_USED), read(frame + IN_USED + 8)
    itemsize = ITEMSIZE[read(plan + DTYPE)]
    out_tensor = out_offset = mid_tensor = mid_offset = in_tensor = in_offset = void = code = 0
    for i in range(chunks + 2):
        if i < chunks:
            n = min(chunk, total - i * chunk)
            code, out_tensor, out_offset = _publish(frame, plan, i, n, out_tensor, out_offset, 0, idle, sleeps)
            if code != 0:
                return code
        j = i - 1
        if 0 <= j < chunks:
            n = min(chunk, total - j * chunk)
            code = wait_all(frame, INPUT, first + j + 1)
            if code == 0:
                code = reserve(frame, RESULT, first_result + j, n * itemsize)
            if code != 0:
                return code
            if j == 0:
                void = anybody_idle(frame, first)
            if void == 0:
                mid_tensor, mid_offset = _reduce_shard(
                    frame, plan, mid_tensor, mid_offset, first + j, first_result + j, n
                )
            publish(frame, RESULT)
        j = i - 2
        if 0 <= j < chunks:
            code = wait_all(frame, RESULT, first_result + j + 1)
            if code != 0:
                return code
            if void == 0:
                n = min(chunk, total - j * chunk)
                flat = result(frame, first_result + j)
                in_tensor, in_offset = _copy_others(frame, plan, targets, in_tensor, in_offset, flat, n, 1)
    next_round(frame, INPUT, chunks)
    next_round(frame, RESULT, chunks)
    return VOID if void != 0 else 0


@compiled("qqq")
def _allreduce(plan: int, idle: int, sleeps: int) -> int:
    frame = read(plan + FRAME)
    code = aborted(frame)
    if code != 0:
        return code
    size, total = ITEMSIZE[read(plan + DTYPE)], read(plan + TOTAL)
    chunk = read(frame + CHUNK) // size
    if read(frame + SIZE) == 2 or total * size <= read(frame + SMALL):
        return _allreduce_directly(frame, plan, chunk, idle, sleeps)
    return _allreduce_by_shards(frame, plan, chunk, idle, sleeps)


@compiled(FUNCTIONS["ddl_allreduce"])
def ddl_allreduce(plan: int) -> int:
    """One bucket: the tensors of the plan, as one run of elements."""
    return _allreduce(plan, 0, 0)


@compiled(FUNCTIONS["ddl_allreduce_try"])
def ddl_allreduce_try(plan: int) -> int:
    """The same, in calls of about 0.1 s as long as not all have come: LATER until then, to be called again.

    The plan's ticket says which run is meant; when that has come to its end, a call says only how.
    """
    ticket = read(plan + TICKET)
    if read(plan + FINISHED) == ticket:
        return read(plan + CODE)
    code = _allreduce(plan, 0, SLEEPS)
    if code != LATER:
        write(plan + CODE, code)
        write(plan + FINISHED, ticket)
    return code


@compiled(FUNCTIONS["ddl_allreduce_idle"])
def ddl_allreduce_idle(plan: int) -> int:
    """Takes part in a bucket without data, which makes it void on every rank: the plan's addresses are not followed."""
    return _allreduce(plan, 1, 0)
