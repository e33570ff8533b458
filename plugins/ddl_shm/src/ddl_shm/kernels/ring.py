"""Allreduce in shared memory: reduce one bucket, chunk by chunk, in one call without the GIL.

The code uses the counters and slots of channels.py; a chunk is the part of the bucket that one round exchanges. For any
size of the chunks, elements are reduced in the order of the ranks. Source and target may be the same memory, because a
rank overwrites a chunk of its tensors only after it has published the chunk. An allreduce is atomic: with the first
chunk, each rank says whether it has no data (``idle``). If at least one rank has no data, all ranks run the rounds, but
no rank writes to a tensor. This module is imported only when numba compiles the kernels. All arguments are int64.
``frame`` is the address of the rank's private memory, and ``plan`` is the address of the plan; see frame.py.
"""

from __future__ import annotations

from ddl_shm.kernels.channels import (
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
from ddl_shm.kernels.frame import (
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
    ITEMSIZE,
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
from ddl_shm.machine_code import SHM
from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.contracts.machine_code.intrinsics import compiled, copy, outside, read, read_double, write

_reduce = outside(CPU, "ddl_reduce")

CACHE_LINE = 64
SLEEPS = 2  # one call of ddl_allreduce_try sleeps at most so many times, each time for the timespec at TIMEOUT
VOID = 3  # return code: some rank has no data, so nothing was written


# --- the tensors of a bucket as one sequence of elements: a place in it is (index of the tensor, offset in elements)


@compiled("qqqqqqq", "qq")
def _copy_pieces(
    plan: int, addresses: int, tensor: int, offset: int, flat: int, count: int, outwards: int
) -> tuple[int, int]:
    """Copy ``count`` elements between the tensors and the contiguous memory at ``flat``.

    The elements begin at element ``offset`` of tensor number ``tensor``. If ``outwards`` is 0, they are copied from the
    tensors to ``flat``; if it is 1, from ``flat`` to the tensors; if it is -1, nothing is copied. ``addresses`` is the
    address of a table of the tensors' addresses. Return the tensor and the offset at which the elements after these
    begin.
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

    On every rank except this one, the elements begin ``offset`` bytes after the beginning of that rank's memory for
    ``round_``. This rank's own elements begin at the address ``own``.
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
    """Reduce the chunk of ``round_``, which has ``count`` elements, and write the results directly to the tensors.

    The chunk begins at element ``offset`` of tensor number ``tensor``. ``sources`` and ``targets`` are the addresses of
    tables of the tensors' addresses. Return the tensor and the offset at which the next chunk begins.
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
    """Wait for a limited time until all ranks have published round ``first``, the first round of this allreduce.

    Return LATER if some rank has not published the round after ``sleeps`` sleeps. In this case the caller tries again
    later. For the next try, save that this rank has published the first chunk, and save ``tensor`` and ``offset``: the
    second chunk begins at element ``offset`` of tensor number ``tensor``.
    """
    # If a try ends with LATER, this rank has already published round ``first``. Other ranks may read the published data
    # and reduce it, so the data cannot be withdrawn, and must not be published a second time. BEGUN tells the next try
    # to skip the round, and the saved place is the begin of the next chunk. Only the first round has a time limit.
    # After it, all ranks are in the allreduce, and each of them finishes without waiting for its user. So the later
    # rounds wait without a limit (but an abort ends the wait).
    code = wait_a_while(frame, INPUT, first + 1, sleeps)
    write(frame + BEGUN, 1 if code == LATER else 0)
    write(frame + BEGUN_TENSOR, tensor)
    write(frame + BEGUN_OFFSET, offset)
    return code


@compiled("qqq", "qq")
def _shard(frame: int, plan: int, n: int) -> tuple[int, int]:
    """Return the beginning and the end of this rank's part of a chunk of ``n`` elements, as indices in the chunk.

    Each part begins at a cache line, so that two ranks never write to the same cache line.
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
    """Copy a chunk of ``n`` elements between the tensors and ``flat``, but leave out this rank's own part.

    The own part is not exchanged, because only this rank reduces it. The arguments and the result are those of
    ``_copy_pieces``.
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
    """Publish chunk ``i``, which has ``n`` elements and begins at element ``offset`` of tensor number ``tensor``.

    Return three numbers: 0 or another return code, and the tensor and the offset at which the next chunk begins. If
    ``whole`` is 0, this rank's own part is left out. With the first chunk, also publish whether this rank has no data
    (``idle`` is not 0). If ``sleeps`` is not 0, wait after the first chunk until all ranks have published it, but only
    for a limited time. If this time was too short, the code is LATER.
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
    """Run an allreduce in which every rank reads the data of all other ranks and reduces all elements itself.

    This way is the fastest for two ranks, and for few bytes. ``chunk`` is the number of elements of a chunk. Return 0,
    VOID, LATER (only if ``sleeps`` is not 0), or another value if the communicator was aborted.
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
    """Reduce this rank's part of a chunk of ``n`` elements. Write the result to the shared memory and to the tensors.

    The chunk begins at element ``offset`` of tensor number ``tensor``. The data of the other ranks is in their slots of
    ``round_``, and the shared memory for results is that of ``result_round``. Return the tensor and the offset at which
    the next chunk begins.
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
    """Run an allreduce in which each rank reduces only its own part of every chunk.

    Then each rank copies the parts that the other ranks have reduced. So there are three steps for each chunk: publish,
    reduce, copy. Turn i of the loop publishes chunk i, reduces chunk i - 1, and copies chunk i - 2. ``chunk`` is the
    number of elements of a chunk. Return 0, VOID, LATER (only if ``sleeps`` is not 0), or another value if the
    communicator was aborted.
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


@compiled(SHM.functions["ddl_allreduce"])
def ddl_allreduce(plan: int) -> int:
    """Run an allreduce of one bucket. ``plan`` is the address of the plan, which contains the bucket's tensors.

    Return 0, VOID if some rank had no data, or HERE or BY_PEER if the communicator was aborted.
    """
    return _allreduce(plan, 0, 0)


@compiled(SHM.functions["ddl_allreduce_try"])
def ddl_allreduce_try(plan: int) -> int:
    """Do the same as ``ddl_allreduce``, but return LATER if some rank has not begun after about 0.1 s.

    After LATER, the caller must call this function again. The ticket in the plan identifies the run. When the run has
    ended, further calls with the same ticket only return the result of the run.
    """
    # A signal may raise an exception in the calling thread after this function has returned and before Python has
    # stored the return code. The caller then calls this function again with the same ticket. If the result were not
    # stored in the plan, this call would start a second allreduce, in which the other ranks do not take part.
    ticket = read(plan + TICKET)
    if read(plan + FINISHED) == ticket:
        return read(plan + CODE)
    code = _allreduce(plan, 0, SLEEPS)
    if code != LATER:
        write(plan + CODE, code)
        write(plan + FINISHED, ticket)
    return code


@compiled(SHM.functions["ddl_allreduce_idle"])
def ddl_allreduce_idle(plan: int) -> int:
    """Take part in the allreduce of a bucket for which this rank has no data. The bucket becomes void on every rank.

    The addresses of tensors in the plan are not used. The return codes are those of ``ddl_allreduce``.
    """
    return _allreduce(plan, 1, 0)
