"""Collectives in shared memory, except allreduce: allgather, broadcast, alltoall and reducescatter.

They use the counters and slots of channels.py. Each rank copies its data to its slots; the other ranks copy or reduce
data from these slots. This module is imported only when numba compiles the kernels. All arguments are int64: numbers,
addresses, and addresses of tables of int64, such as ``nbytes``. ``frame`` is the address of the rank's private memory.
"""

from __future__ import annotations

from ddl_shm.kernels.channels import INPUT, aborted, next_round, publish, reserve, slot, wait, wait_all
from ddl_shm.kernels.frame import (
    ALLTOALL,
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
    REDUCESCATTER,
    SIZE,
    SOURCES,
    TABLE,
    TARGETS,
    TENSORS,
    TICKET,
    TOTAL,
)
from ddl_shm.machine_code import SHM
from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.contracts.machine_code.intrinsics import compiled, copy, outside, read, read_double, write

_reduce = outside(CPU, "ddl_reduce")


@compiled(SHM.functions["ddl_gather"])
def ddl_gather(frame: int, source: int, target: int, nbytes: int) -> int:
    """Write the sources of all ranks to ``target``, in the order of the ranks. Rank r's source has ``nbytes[r]`` bytes.

    For a broadcast, only the root's number of bytes is not 0. Return 0, or another value if the communicator was
    aborted.
    """
    rank, size, chunk = read(frame + RANK), read(frame + SIZE), read(frame + CHUNK)
    first = read(frame + IN_USED)
    own = read(nbytes + 8 * rank)
    most = 0
    for r in range(size):
        most = max(most, read(nbytes + 8 * r))
    rounds = (most + chunk - 1) // chunk
    for i in range(rounds + 1):
        if i < rounds:
            code = reserve(frame, INPUT, first + i, min(chunk, most - i * chunk))
            if code != 0:
                return code
            n = min(chunk, own - i * chunk)
            if n > 0:
                copy(slot(frame, rank, first + i), source + i * chunk, n)
            publish(frame, INPUT)
        if i > 0:
            at = target + (i - 1) * chunk
            for r in range(size):
                n = min(chunk, read(nbytes + 8 * r) - (i - 1) * chunk)
                if n > 0 and r != rank:
                    code = wait(frame, r, INPUT, first + i)
                    if code != 0:
                        return code
                    copy(at, slot(frame, r, first + i - 1), n)
                if n > 0 and r == rank and at != source + (i - 1) * chunk:
                    copy(at, source + (i - 1) * chunk, n)
                at += read(nbytes + 8 * r)
    next_round(frame, INPUT, rounds)
    return 0


@compiled("qqq")
def _begin(n: int, i: int, rounds: int) -> int:
    """Return the index of the first element of part ``i``, if ``n`` elements are divided into ``rounds`` parts.

    The lengths of two parts differ by at most one.
    """
    return n // rounds * i + min(i, n % rounds)


@compiled("qqqqqqqq")
def _publish_row(frame: int, round_: int, i: int, rounds: int, source: int, row: int, itemsize: int, most: int) -> int:
    """Publish part ``i`` of this rank's data for all other ranks, in ``round_``.

    The data at ``source`` is in the order of the ranks: ``row[d]`` elements are for rank d. The data for each rank is
    divided into ``rounds`` parts. ``most`` is the number of elements that the rank with the most data sends in all
    rounds together. Return 0, or another value if the communicator was aborted.
    """
    rank, size = read(frame + RANK), read(frame + SIZE)
    code = reserve(frame, INPUT, round_, ((most + rounds - 1) // rounds + size) * itemsize)
    if code != 0:
        return code
    place = slot(frame, rank, round_)
    for d in range(size):
        n = read(row + 8 * d)
        begin = _begin(n, i, rounds)
        length = (_begin(n, i + 1, rounds) - begin) * itemsize
        if d != rank and length > 0:
            copy(place, source + begin * itemsize, length)
            place += length
        source += n * itemsize
    publish(frame, INPUT)
    return 0


@compiled("qqqqq")
def _offset_in_slot(frame: int, owner: int, i: int, rounds: int, row: int) -> int:
    """Return the offset, in elements, of the data for this rank in a slot of rank ``owner``.

    The slot contains part ``i`` of the data that ``owner`` sends to all other ranks. ``row[d]`` is the number of
    elements that ``owner`` sends to rank d, and ``rounds`` is the number of parts.
    """
    at = 0
    for d in range(read(frame + RANK)):
        if d != owner:
            n = read(row + 8 * d)
            at += _begin(n, i + 1, rounds) - _begin(n, i, rounds)
    return at


@compiled("qqq")
def _rounds(frame: int, total: int, itemsize: int) -> int:
    """Return the number of rounds in which a rank can send ``total`` elements, counted over all other ranks.

    In each round, the parts for all other ranks must fit together into one slot, the memory that the rank uses for this
    round. The length of each part may be rounded up.
    """
    room = read(frame + CHUNK) // itemsize - read(frame + SIZE)
    return (total + room - 1) // room


@compiled(SHM.functions["ddl_alltoall"])
def ddl_alltoall(frame: int, source: int, target: int, nbytes: int) -> int:
    """Send ``nbytes[s * size + d]`` bytes from each rank s to each rank d.

    ``source`` contains this rank's parts for all ranks. The parts from all ranks are written to ``target``. Both are in
    the order of the ranks. Return 0, or another value if the communicator was aborted.
    """
    rank, size = read(frame + RANK), read(frame + SIZE)
    first = read(frame + IN_USED)
    most = 0
    for s in range(size):
        total = 0
        for d in range(size):
            if d != s:
                total += read(nbytes + 8 * (s * size + d))
        most = max(most, total)
    rounds = _rounds(frame, most, 1)
    row = nbytes + 8 * rank * size
    own_source, own_target = source, target
    for r in range(rank):
        own_source += read(row + 8 * r)
        own_target += read(nbytes + 8 * (r * size + rank))
    if read(row + 8 * rank) > 0:
        copy(own_target, own_source, read(row + 8 * rank))
    for i in range(rounds + 1):
        if i < rounds:
            code = _publish_row(frame, first + i, i, rounds, source, row, 1, most)
            if code != 0:
                return code
        if i > 0:
            at = target
            for s in range(size):
                peers_row = nbytes + 8 * s * size
                n = read(peers_row + 8 * rank)
                begin = _begin(n, i - 1, rounds)
                length = _begin(n, i, rounds) - begin
                if s != rank and length > 0:
                    code = wait(frame, s, INPUT, first + i)
                    if code != 0:
                        return code
                    offset = _offset_in_slot(frame, s, i - 1, rounds, peers_row)
                    copy(at + begin, slot(frame, s, first + i - 1) + offset, length)
                at += n
    next_round(frame, INPUT, rounds)
    return 0


@compiled("qqqqqqq", "")
def _reduce_row_part(frame: int, plan: int, source: int, target: int, round_: int, i: int, rounds: int) -> None:
    """Reduce part ``i`` of this rank's elements, and write the result to ``target``.

    The elements of the other ranks are in their slots of ``round_``. This rank's own elements are not in a slot; they
    begin at ``source``. ``plan`` is the address of the description of the collective (see frame.py).
    """
    rank, size = read(frame + RANK), read(frame + SIZE)
    itemsize = ITEMSIZE[read(plan + DTYPE)]
    row = plan + COUNTS
    n = read(row + 8 * rank)
    begin = _begin(n, i, rounds)
    length = _begin(n, i + 1, rounds) - begin
    if length == 0:
        return
    for s in range(size):
        at = source + begin * itemsize
        if s != rank:
            at = slot(frame, s, round_) + _offset_in_slot(frame, s, i, rounds, row) * itemsize
        write(frame + TABLE + 8 * s, at)
    prescale, scale = read_double(plan + PRESCALE), read_double(plan + POSTSCALE)
    out = target + begin * itemsize
    _reduce(frame + TABLE, size, out, length, read(plan + DTYPE), read(plan + OP), prescale, scale)


@compiled(SHM.functions["ddl_reducescatter"])
def ddl_reducescatter(frame: int, plan: int, source: int, target: int) -> int:
    """Reduce the sources of all ranks, and write this rank's part of the result to ``target``.

    ``plan`` is the address of the description of the collective (see frame.py). Its counts are the lengths of the
    parts, one for each rank. Return 0, or another value if the communicator was aborted.
    """
    rank = read(frame + RANK)
    itemsize = ITEMSIZE[read(plan + DTYPE)]
    first = read(frame + IN_USED)
    most = read(plan + TOTAL)
    rounds = _rounds(frame, most, itemsize)
    own = source
    for r in range(rank):
        own += read(plan + COUNTS + 8 * r) * itemsize
    for i in range(rounds + 1):
        if i < rounds:
            code = _publish_row(frame, first + i, i, rounds, source, plan + COUNTS, itemsize, most)
            if code != 0:
                return code
        if i > 0:
            code = wait_all(frame, INPUT, first + i)
            if code != 0:
                return code
            _reduce_row_part(frame, plan, own, target, first + i - 1, i - 1, rounds)
    next_round(frame, INPUT, rounds)
    return 0


@compiled("q")
def _move(plan: int) -> int:
    frame, source, target, kind = read(plan + FRAME), read(plan + SOURCES), read(plan + TARGETS), read(plan + TENSORS)
    code = aborted(frame)
    if code != 0:
        return code
    if kind == ALLTOALL:
        return ddl_alltoall(frame, source, target, plan + COUNTS)
    if kind == REDUCESCATTER:
        return ddl_reducescatter(frame, plan, source, target)
    return ddl_gather(frame, source, target, plan + COUNTS)


@compiled(SHM.functions["ddl_move"])
def ddl_move(plan: int) -> int:
    """Run an allgather, a broadcast, an alltoall or a reducescatter. ``plan`` is the address of its plan.

    When a run has ended, further calls with the same ticket in the plan only return the result of the run. Return 0, or
    HERE or BY_PEER if the communicator was aborted.
    """
    # As in ddl_allreduce_try, a signal may raise an exception before the caller has stored the return code.
    ticket = read(plan + TICKET)
    if read(plan + FINISHED) == ticket:
        return read(plan + CODE)
    code = _move(plan)
    write(plan + CODE, code)
    write(plan + FINISHED, ticket)
    return code
