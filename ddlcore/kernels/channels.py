"""Counters and slots in shared memory, for numba: publishing, waiting, giving up; knows not what is in a slot.

**Channels.** Every rank owns a line of counters in the segment and a ring of slots. A collective is a number
of rounds, the same on every rank. In round n a rank *publishes*: it fills the round's place in its ring, if
it has something to say, and adds one to its counter; peers read the place when they see the counter beyond
n. There are two channels, one for what goes in, one for partial results (allreduce of many ranks).

**Places.** A round takes as many bytes of the ring as its collective gives it, at most a slot, and lies
within one slot; rounds of few bytes share it. All ranks give a round the same bytes, so its place is the
same in all rings, and is known without a word (``reserve``).

**No second counter is needed** to know when a slot may be filled again. A rank publishes round n only after
it has read all that it wants of rounds up to n - 2, in every collective of the ring. So a counter that has
reached n + 1 says that its rank is done with round n - 2, and a slot whose last round was m may be filled
when every counter has reached m + 3. Peers reach that without us once we have published m + 2, hence a ring
has at least 4 slots. Nobody waits at the end of a collective: slower peers still find its slots filled. The
marks of who comes without data are kept for ROUNDS rounds by the same rule.

Imported only while compiling. Arguments are int64; ``frame`` is the rank's private memory, see frame.py.
"""

from __future__ import annotations

from ddlcore.kernels.code import FUNCTIONS
from ddlcore.kernels.frame import (
    ABORTED,
    CHANNEL,
    CHUNK,
    CURSOR,
    HEADER,
    IN_SEEN,
    IN_USED,
    INPUTS,
    LAST,
    LINE,
    MARKS,
    MOST_SLOTS,
    PLACES,
    RANK,
    RESULTS,
    RING,
    ROUNDS,
    SIZE,
    SLEEPERS,
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
    "LATER",
    "RESULT",
    "aborted",
    "anybody_idle",
    "ddl_abort",
    "ddl_barrier",
    "enter",
    "next_round",
    "publish",
    "reserve",
    "result",
    "slot",
    "wait",
    "wait_a_while",
    "wait_all",
]

INPUT, RESULT = 0, 1  # channels
PLACE_BYTES = 128  # what a round takes is rounded up to two cache lines
LATER = 4  # not all had come
HERE, BY_PEER = 1, 2  # why a call failed: this rank's own abort(), or a peer's


@compiled("qqq")
def _counter(frame: int, rank: int, channel: int) -> int:
    """The address of a rank's counter."""
    return read(frame + HEADER) + (1 + rank) * LINE + channel * CHANNEL


@compiled("q")
def aborted(frame: int) -> int:
    """Whose abort ended this communicator: HERE, BY_PEER, or 0."""
    if load_word(frame + ABORTED) != 0:
        return HERE
    return BY_PEER if load_word(read(frame + HEADER)) != 0 else 0


@compiled("qqqq")
def _wait_slowly(frame: int, word: int, value: int, sleeps: int) -> int:
    """Spins for microseconds, yields the core some times, then sleeps: the core may be the one that computes.

    ``sleeps``: after how many it gives up (LATER); -1: never.
    """
    for _ in range(read(frame + SPINS)):
        pause()
        if load_word(word) >= value:
            return 0
    for _ in range(read(frame + YIELDS)):
        sched_yield()
        if load_word(word) >= value:
            return 0
        code = aborted(frame)
        if code != 0:
            return code
    while True:
        add_word(word + SLEEPERS, 1)  # before the last look: who adds to the word later, sees a sleeper
        seen = load_word(word)
        code = aborted(frame)
        if seen < value and code == 0:
            futex_wait(word, seen, frame + TIMEOUT)
        add_word(word + SLEEPERS, -1)
        if code != 0:
            return code
        if load_word(word) >= value:
            return 0
        sleeps -= 1
        if sleeps == 0:
            return LATER


@compiled("qqqq")
def wait(frame: int, rank: int, channel: int, value: int) -> int:
    """Waits until a rank's counter has reached ``value``; not 0: aborted."""
    word = _counter(frame, rank, channel)
    if load_word(word) >= value:
        return 0
    return _wait_slowly(frame, word, value, -1)


@compiled("qqqq")
def wait_a_while(frame: int, channel: int, value: int, sleeps: int) -> int:
    """As ``wait_all``, but gives up (LATER) when it has slept so many times for one rank."""
    rank = read(frame + RANK)
    for r in range(read(frame + SIZE)):
        word = _counter(frame, r, channel)
        if r != rank and load_word(word) < value:
            code = _wait_slowly(frame, word, value, sleeps)
            if code != 0:
                return code
    return 0


@compiled("qqq")
def wait_all(frame: int, channel: int, value: int) -> int:
    """Waits until every rank's counter has reached ``value``."""
    if read(frame + IN_SEEN + 8 * channel) >= value:
        return 0
    rank, size = read(frame + RANK), read(frame + SIZE)
    for k in range(1, size):
        peer = rank + k  # each rank begins with its neighbour: not all look at the same line at once
        code = wait(frame, peer if peer < size else peer - size, channel, value)
        if code != 0:
            return code
    write(frame + IN_SEEN + 8 * channel, value)
    return 0


@compiled("qqqq")
def reserve(frame: int, channel: int, round_: int, nbytes: int) -> int:
    """Gives ``round_`` its place of at most a slot, and waits until nobody reads there any more; not 0: aborted.

    Every rank calls it for the same rounds with the same ``nbytes``, in their order.
    """
    chunk = read(frame + CHUNK)
    length = (max(nbytes, 1) + PLACE_BYTES - 1) // PLACE_BYTES * PLACE_BYTES
    place = read(frame + CURSOR + 8 * channel)
    within = place & (chunk - 1)
    if within + length > chunk:
        place += chunk - within
        within = 0
    if place == read(frame + RING):
        place = 0
    last = frame + LAST + 8 * (channel * MOST_SLOTS + place // chunk)
    if within == 0:
        code = wait_all(frame, channel, read(last) + 3)
        if code != 0:
            return code
    write(last, round_)
    write(frame + PLACES + 8 * (channel * ROUNDS + round_ % ROUNDS), place)
    write(frame + CURSOR + 8 * channel, place + length)
    return 0


@compiled("qqq")
def enter(frame: int, round_: int, idle: int) -> int:
    """Says whether this rank comes into the bucket that begins with ``round_`` without data; publishing shows it.

    Waits, hardly ever, until nobody looks for the mark of ROUNDS rounds ago; not 0: aborted.
    """
    code = wait_all(frame, INPUT, round_ - ROUNDS + 3)
    if code == 0:
        word = _counter(frame, read(frame + RANK), INPUT) + MARKS
        bit = 1 << (round_ % ROUNDS)
        marks = read(word)
        marked = marks | bit if idle != 0 else marks & ~bit
        if marked != marks:
            store_word(word, marked)
    return code


@compiled("qq")
def anybody_idle(frame: int, round_: int) -> int:
    """Whether some rank has come without data; after ``wait_all`` for the round."""
    for r in range(read(frame + SIZE)):
        if (load_word(_counter(frame, r, INPUT) + MARKS) >> (round_ % ROUNDS)) & 1:
            return 1
    return 0


@compiled("qq", "")
def publish(frame: int, channel: int) -> None:
    """Adds one to this rank's counter, behind all that it wrote, and wakes who sleeps for it."""
    word = _counter(frame, read(frame + RANK), channel)
    add_word(word, 1)
    if load_word(word + SLEEPERS) > 0:
        futex_wake(word)


@compiled("qqq")
def slot(frame: int, rank: int, round_: int) -> int:
    """The address of a rank's memory of ``round_`` in the input channel; after ``reserve``."""
    return read(frame + INPUTS) + rank * read(frame + RING) + read(frame + PLACES + 8 * (round_ % ROUNDS))


@compiled("qq")
def result(frame: int, round_: int) -> int:
    """The address of the memory of ``round_`` that all ranks write their results to; after ``reserve``."""
    return read(frame + RESULTS) + read(frame + PLACES + 8 * (RESULT * ROUNDS + round_ % ROUNDS))


@compiled("qqq", "")
def next_round(frame: int, channel: int, rounds: int) -> None:
    """Puts ``rounds`` rounds of a channel behind us."""
    write(frame + IN_USED + 8 * channel, read(frame + IN_USED + 8 * channel) + rounds)


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
        for channel in range(2):
            futex_wake(_counter(frame, r, channel))
    return 0
