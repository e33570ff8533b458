"""Counters and slots in shared memory, for numba: publishing, waiting, giving up; knows not what is in a slot.

**Lanes.** Every rank owns a line of counters in the segment and SLOTS slots of memory. A collective is a
number of rounds, the same on every rank. In round n a rank *publishes*: it fills slot n % SLOTS, if it has
something to say, and adds one to its counter; peers read the slot when they see the counter beyond n. There
are two lanes, one for what goes in, one for partial results (allreduce of many ranks).

**No second counter is needed** to know when a slot may be filled again. A rank publishes round n only after
it has read all that it wants of rounds up to n - 2, in every collective of the ring. So a counter that has
reached n + 1 says that its rank is done with round n - 2, and slot n % SLOTS may be filled when every counter
has reached n - SLOTS + 3. Nobody waits at the end of a collective: slower peers still find its slots filled.

Imported only while compiling. Arguments are int64; ``frame`` is the rank's private memory, see frame.py.
"""

from __future__ import annotations

from ddlcore.kernels.code import FUNCTIONS
from ddlcore.kernels.frame import (
    ABORTED,
    CHUNK,
    HEADER,
    IN_SEEN,
    IN_USED,
    LINE,
    MARKS,
    RANK,
    RESULTS,
    SIZE,
    SLEEPERS,
    SLOTS,
    SLOTS_AT,
    SPINS,
    TIMEOUT,
    YIELDS,
)
from ddlcore.kernels.intrinsics import (
    add_word,
    compiled,
    futex_wait,
    futex_wake,
    load_word,
    pause,
    read,
    sched_yield,
    store_word,
    write,
)

__all__ = [
    "INPUT",
    "RESULT",
    "anybody_idle",
    "ddl_abort",
    "ddl_barrier",
    "enter",
    "next_round",
    "publish",
    "result",
    "slot",
    "wait",
    "wait_all",
    "wait_free",
]

INPUT, RESULT = 0, 1  # lanes
HERE, ELSEWHERE = 1, 2  # why a call failed: this rank's own abort(), or a peer's


@compiled("qqq")
def _counter(frame: int, rank: int, lane: int) -> int:
    """The address of a rank's counter."""
    return read(frame + HEADER) + (1 + rank) * LINE + lane * (LINE // 2)


@compiled("q")
def _aborted(frame: int) -> int:
    if load_word(frame + ABORTED) != 0:
        return HERE
    return ELSEWHERE if load_word(read(frame + HEADER)) != 0 else 0


@compiled("qqq")
def _wait_slowly(frame: int, word: int, value: int) -> int:
    """Spins for microseconds, yields the core some times, then sleeps: the core may be the one that computes."""
    for _ in range(read(frame + SPINS)):
        pause()
        if load_word(word) >= value:
            return 0
    for _ in range(read(frame + YIELDS)):
        sched_yield()
        if load_word(word) >= value:
            return 0
        code = _aborted(frame)
        if code != 0:
            return code
    while True:
        add_word(word + SLEEPERS, 1)  # before the last look: who adds to the word later, sees a sleeper
        seen = load_word(word)
        code = _aborted(frame)
        if seen < value and code == 0:
            futex_wait(word, seen, frame + TIMEOUT)
        add_word(word + SLEEPERS, -1)
        if code != 0:
            return code
        if load_word(word) >= value:
            return 0


@compiled("qqqq")
def wait(frame: int, rank: int, lane: int, value: int) -> int:
    """Waits until a rank's counter has reached ``value``; not 0: aborted."""
    word = _counter(frame, rank, lane)
    if load_word(word) >= value:
        return 0
    return _wait_slowly(frame, word, value)


@compiled("qqq")
def wait_all(frame: int, lane: int, value: int) -> int:
    """Waits until every rank's counter has reached ``value``."""
    if read(frame + IN_SEEN + 8 * lane) >= value:
        return 0
    rank, size = read(frame + RANK), read(frame + SIZE)
    for k in range(1, size):
        peer = rank + k  # each rank begins with its neighbour: not all look at the same line at once
        code = wait(frame, peer if peer < size else peer - size, lane, value)
        if code != 0:
            return code
    write(frame + IN_SEEN + 8 * lane, value)
    return 0


@compiled("qqq")
def wait_free(frame: int, lane: int, round_: int) -> int:
    """Waits until nobody reads this rank's slot of ``round_`` any more; see the top of the file."""
    return wait_all(frame, lane, round_ - SLOTS + 3)


@compiled("qqq", "")
def enter(frame: int, round_: int, idle: int) -> None:
    """Says whether this rank comes into the batch that begins with ``round_`` without data; publishing shows it.

    The word is the slot's own, so it stands as long as the slot does.
    """
    write(_counter(frame, read(frame + RANK), INPUT) + MARKS + 8 * (round_ % SLOTS), idle)


@compiled("qq")
def anybody_idle(frame: int, round_: int) -> int:
    """Whether some rank has come without data; after ``wait_all`` for the round."""
    for r in range(read(frame + SIZE)):
        if read(_counter(frame, r, INPUT) + MARKS + 8 * (round_ % SLOTS)) != 0:
            return 1
    return 0


@compiled("qq", "")
def publish(frame: int, lane: int) -> None:
    """Adds one to this rank's counter, behind all that it wrote, and wakes who sleeps for it."""
    word = _counter(frame, read(frame + RANK), lane)
    add_word(word, 1)
    if load_word(word + SLEEPERS) > 0:
        futex_wake(word)


@compiled("qqq")
def slot(frame: int, rank: int, round_: int) -> int:
    """The address of a rank's slot of ``round_`` in the input lane."""
    return read(frame + SLOTS_AT) + (rank * SLOTS + round_ % SLOTS) * read(frame + CHUNK)


@compiled("qq")
def result(frame: int, round_: int) -> int:
    """The address of the slot of ``round_`` that all ranks write their results to."""
    return read(frame + RESULTS) + (round_ % SLOTS) * read(frame + CHUNK)


@compiled("qqq", "")
def next_round(frame: int, lane: int, rounds: int) -> None:
    """Puts ``rounds`` rounds of a lane behind us."""
    write(frame + IN_USED + 8 * lane, read(frame + IN_USED + 8 * lane) + rounds)


@compiled(FUNCTIONS["ddl_barrier"])
def ddl_barrier(frame: int) -> int:
    """Returns on no rank before every rank has called it."""
    first = read(frame + IN_USED)
    publish(frame, INPUT)
    next_round(frame, INPUT, 1)
    return wait_all(frame, INPUT, first + 1)


@compiled(FUNCTIONS["ddl_abort"])
def ddl_abort(frame: int) -> int:
    """Makes the pending and every later call of all ranks fail, and wakes who sleeps; from any thread."""
    store_word(frame + ABORTED, 1)
    store_word(read(frame + HEADER), 1 + read(frame + RANK))
    for r in range(read(frame + SIZE)):
        for lane in range(2):
            futex_wake(_counter(frame, r, lane))
    return 0
