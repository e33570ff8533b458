"""Allreduce over the channels, for numba: reduces one bucket from the first chunk to the last, without the GIL.

Elements are reduced in rank order, whatever the size of the chunks. Source and target may be the same memory, because a
rank overwrites a chunk only after it has published it. An allreduce is atomic: with its first chunk, a rank says
whether it takes part without data (``idle``). If at least one rank does, all ranks run the rounds, but no rank writes
to a tensor. This module is imported only while compiling. All arguments are int64.
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
from ddlcore.kernels.functions import FUNCTIONS
from ddlcore.kernels.intrinsics import compiled, copy, outside, read, read_double, write

_reduce = outside("ddl_reduce")

CACHE_LINE = 64
SLEEPS = 2  # how many times one try sleeps, for SLEEP_NS each
VOID = 3  # return code: some rank entered without data, so nothing was written


# --- a bucket of tensors as one run of elements: (tensor, offset) is a place in it


@compiled("qqqqqqq", "qq")
def _copy_pieces(
    plan: int, addresses: int, tensor: int, offset: int, flat: int, count: int, outwards: int
) -> tuple[int, int]:
    """Copy ``count`` elements between the tensors, from the place (``tensor``, ``offset``) on, and the memory at
    ``flat``.

    ``outwards``: 0 copies into ``flat``, 1 copies from ``flat`` to the tensors, and -1 copies nothing. ``addresses`` is
    the table of the tensors' addresses. Return the place after these elements.
    """
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
    """Reduce ``count`` elements of all ranks into ``target``.

    The elements begin ``offset`` bytes after the begin of each peer's slot of ``round_``; this rank's own elements are
    at ``own``.
    """
    rank, size = read(frame + RANK), read(frame + SIZE)
    for r in range(size):
        write(frame + TABLE + 8 * r, own if r == rank else slot(frame, r, round_) + offset)
    prescale, scale = read_double(plan + PRESCALE), read_double(plan + POSTSCALE)
    _reduce(frame + TABLE, size, target, count, read(plan + DTYPE), read(plan + OP), prescale, scale)


@compiled("qqqqqqqq", "qq")
def _reduce_pieces(
    frame: int, plan: int, sources: int, targets: int, tensor: int, offset: int, round_: int, count: int
) -> tuple[int, int]:
    """Reduce the chunk of ``count`` elements in the slots of ``round_`` directly into the tensors.

    The chunk begins at the place (``tensor``, ``offset``). Return the place after it.
    """
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
    """Wait until all ranks have published round ``first``; return LATER if they have not after ``sleeps`` sleeps.

    Also save for the next try that this rank has published its first chunk, and (``tensor``, ``offset``), where the
    second chunk begins.
    """
    # A try that ends with LATER has already published round ``first``: peers may see it and reduce with it, so it can
    # be neither taken back nor published a second time. BEGUN tells the next try to skip that round, and the saved
    # place tells it where the next chunk begins. Only this first round has a time limit. When it is complete, all ranks
    # have entered, and each finishes without waiting for its user, so the later rounds wait without a limit (an abort
    # still ends them).
    code = wait_a_while(frame, INPUT, first + 1, sleeps)
    write(frame + BEGUN, 1 if code == LATER else 0)
    write(frame + BEGUN_TENSOR, tensor)
    write(frame + BEGUN_OFFSET, offset)
    return code


@compiled("qqq", "qq")
def _shard(frame: int, plan: int, n: int) -> tuple[int, int]:
    """Return the begin and end of this rank's part of a chunk of ``n`` elements.

    The parts are such that two ranks never write to the same cache line.
    """
    rank, size = read(frame + RANK), read(frame + SIZE)
    line = CACHE_LINE // ITEMSIZE[read(plan + DTYPE)]
    shard = ((n + size - 1) // size + line - 1) // line * line
    begin = min(n, rank * shard)
    return begin, min(n, begin + shard)


@compiled("qqqqqqqq", "qq")
def _copy_others(
    frame: int, plan: int, addresses: int, tensor: int, offset: int, flat: int, n: int, outwards: int
) -> tuple[int, int]:
    """Copy a chunk of ``n`` elements as ``_copy_pieces`` does, except for this rank's own part.

    Only this rank reduces its own part, so the part is not exchanged.
    """
    size = ITEMSIZE[read(plan + DTYPE)]
    begin, end = _shard(frame, plan, n)
    tensor, offset = _copy_pieces(plan, addresses, tensor, offset, flat, begin, outwards)
    tensor, offset = _copy_pieces(plan, addresses, tensor, offset, 0, end - begin, -1)
    return _copy_pieces(plan, addresses, tensor, offset, flat + end * size, n - end, outwards)


@compiled("qqqqqqqqq", "qqq")
def _publish(
    frame: int, plan: int, i: int, n: int, tensor: int, offset: int, whole: int, idle: int, sleeps: int
) -> tuple[int, int, int]:
    """Publish chunk ``i`` of ``n`` elements, which begins at (tensor, offset); return (code, the place after it).

    If ``whole`` is 0, this rank's own part is left out. The first chunk also says whether this rank has no data
    (``idle``). After the first chunk, if ``sleeps`` is not 0, wait a limited time for all ranks.
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
    """Run an allreduce in which every rank reads the slots of all peers and reduces all elements itself.

    This is best for two ranks, and for few bytes.
    """
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
    """Reduce this rank's part of a chunk of ``n`` elements into the shared slot of results and into its own tensors.

    The chunk begins at (tensor, offset); return the place after it.
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
    """Run an allreduce in which each rank reduces its part of every chunk, and then copies the other parts from the
    others.

    There are three steps for each chunk: publish, reduce, copy. Each turn of the loop does the first step for one
    chunk, the second for the chunk before it, and the third for the chunk before that.
    """
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
    """Reduce one bucket, the tensors of the plan, as one sequence of elements. ``plan``: the address of the plan."""
    return _allreduce(plan, 0, 0)


@compiled(FUNCTIONS["ddl_allreduce_try"])
def ddl_allreduce_try(plan: int) -> int:
    """Do the same as ``ddl_allreduce``, but return LATER if not all ranks have arrived after about 0.1 s.

    The caller then calls it again. The plan's ticket identifies the run. When that run has ended, further calls with
    the same ticket only return its result.
    """
    # A signal may raise an exception in the calling thread after this function has returned and before Python has
    # stored the code. The caller then asks again with the same ticket. Without this record, it would start a second
    # allreduce that the peers do not take part in.
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
    """Take part in the allreduce of a bucket for which this rank has no data; that makes the bucket void on every rank.

    The addresses of tensors in the plan are not used.
    """
    return _allreduce(plan, 1, 0)
