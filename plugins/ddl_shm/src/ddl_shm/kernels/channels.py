"""Counters and slots in shared memory: publish, wait and abort. The contents of the slots do not matter here.

**Channels.** Every rank has a line of counters and a ring of slots in the shared memory segment. (Slots here are pieces
of memory, not slots of a schedule.) A collective consists of rounds, equally many on every rank. In round n a rank
*publishes*: the rank fills the round's place in its ring, if it has data for the round, and adds one to its counter.
Another rank reads the place when it sees that the counter is greater than n. There are two channels: one for input, and
one for partial results (only for an allreduce of many ranks).

**Places.** A collective decides how many bytes of the ring a round takes, at most one slot. The place of a round is
within one slot, and small rounds share a slot. All ranks use the same number of bytes for a round. So the place of a
round is the same in all rings, and every rank computes the place without communication (``reserve``).

**No second counter is needed** to know when a slot may be filled again. In every collective, a rank publishes round n
only after it has read everything that it needs from rounds up to n - 2. So when a rank's counter has reached n + 1, the
rank has finished with round n - 2. Therefore a slot whose last round was m may be filled again when every counter has
reached m + 3. After this rank has published round m + 2, the other ranks can reach m + 3 without any further action of
this rank. So a ring needs at least 4 slots. A rank does not wait at the end of a collective: its slots stay filled for
slower ranks. By the same rule, the bits that mark ranks without data are valid for ROUNDS rounds.

This module is imported only when numba compiles the kernels. All arguments are int64. ``frame`` is the address of the
rank's private memory (see frame.py), and ``channel`` is INPUT or RESULT.
"""

from __future__ import annotations

from ddl_shm.kernels.frame import (
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
from ddl_shm.kernels.waiting import futex_wait, futex_wake, pause, sched_yield
from ddl_shm.machine_code import SHM
from ddlcore.contracts.machine_code.intrinsics import (
    add_word,
    compiled,
    load_word,
    read,
    store_word,
    write,
)

INPUT, RESULT = 0, 1  # channels
PLACE_BYTES = 128  # the bytes of a round are rounded up to a multiple of two cache lines
LATER = 4  # return code: not all ranks have arrived yet
HERE, BY_PEER = 1, 2  # return codes: aborted by this rank itself, or by a peer


@compiled("qqq")
def _counter(frame: int, rank: int, channel: int) -> int:
    """Return the address of the counter that ``rank`` increases in ``channel``."""
    return read(frame + HEADER) + (1 + rank) * LINE + channel * CHANNEL


@compiled("q")
def aborted(frame: int) -> int:
    """Return HERE if this rank has aborted the communicator, BY_PEER if another rank has, and 0 if no rank has."""
    if load_word(frame + ABORTED) != 0:
        return HERE
    return BY_PEER if load_word(read(frame + HEADER)) != 0 else 0


@compiled("qqqq")
def _wait_slowly(frame: int, word: int, value: int, sleeps: int) -> int:
    """Wait until the counter at the address ``word`` has reached ``value``, and return 0.

    First spin for microseconds, then yield the core, then sleep. The time of spinning is short, because the other rank
    may need this core. Return LATER after ``sleeps`` sleeps (-1: no limit). Return HERE or BY_PEER if the communicator
    was aborted.
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
    # This thread must not sleep through a wake-up. ``publish`` adds to the counter first and then reads SLEEPERS; this
    # code adds to SLEEPERS first and then reads the counter. All four accesses are sequentially consistent, so at least
    # one side sees the change of the other side: either this thread sees the new counter and does not sleep, or the
    # publisher sees a sleeper and wakes this thread. If the publisher publishes between the read of the counter and the
    # system call, the futex finds that the word is no longer ``seen`` and returns at once. (A futex compares 32 bits;
    # 2^32 rounds cannot pass in that gap.) An abort does not change a counter, so its wake-up can be missed in the same
    # gap. That is why every sleep has a timeout, after which the loop checks for an abort again.
    while True:
        add_word(word + SLEEPERS, 1)
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
    """Wait until the counter of ``rank`` in ``channel`` has reached ``value``.

    Return 0, or HERE or BY_PEER if the communicator was aborted.
    """
    word = _counter(frame, rank, channel)
    if load_word(word) >= value:
        return 0
    return _wait_slowly(frame, word, value, -1)


@compiled("qqqq")
def wait_a_while(frame: int, channel: int, value: int, sleeps: int) -> int:
    """Wait for a limited time until every rank's counter in ``channel`` has reached ``value``.

    Return 0, LATER after ``sleeps`` sleeps in the wait for one of the ranks, or HERE or BY_PEER if the communicator was
    aborted.
    """
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
    """Wait until every rank's counter in ``channel`` has reached ``value``, without a time limit.

    Return 0, or HERE or BY_PEER if the communicator was aborted.
    """
    if read(frame + IN_SEEN + 8 * channel) >= value:
        return 0
    rank, size = read(frame + RANK), read(frame + SIZE)
    for k in range(1, size):
        peer = rank + k  # begin with the next rank, so that not all ranks read the same cache line at once
        code = wait(frame, peer if peer < size else peer - size, channel, value)
        if code != 0:
            return code
    write(frame + IN_SEEN + 8 * channel, value)
    return 0


@compiled("qqqq")
def reserve(frame: int, channel: int, round_: int, nbytes: int) -> int:
    """Choose a place of ``nbytes`` bytes in the ring for ``round_``.

    Wait until no other rank reads the old data at this place any more. Every rank calls this for the same rounds, in
    the same order, with the same ``nbytes``. ``nbytes`` is at most the size of a slot. Return 0, or HERE or BY_PEER if
    the communicator was aborted.
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
    """Set or clear the bit that says that this rank has no data for a bucket.

    The bucket begins with ``round_``. The bit is set if ``idle`` is not 0. Other ranks see the bit when the round is
    published. ROUNDS rounds ago, the same bit belonged to another bucket. So first wait until no rank reads the old
    value any more; this wait is rarely necessary. Return 0, or HERE or BY_PEER if the communicator was aborted.
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
    """Return 1 if at least one rank has no data for the bucket that begins with ``round_``, otherwise 0.

    Call this function only after ``wait_all`` for this round has returned 0.
    """
    for r in range(read(frame + SIZE)):
        if (load_word(_counter(frame, r, INPUT) + MARKS) >> (round_ % ROUNDS)) & 1:
            return 1
    return 0


@compiled("qq", "")
def publish(frame: int, channel: int) -> None:
    """Publish a round: add one to this rank's counter in ``channel``, and wake the threads that wait for the counter.

    Another rank that sees the new value of the counter also sees everything that this rank wrote before.
    """
    word = _counter(frame, read(frame + RANK), channel)
    add_word(word, 1)
    if load_word(word + SLEEPERS) > 0:
        futex_wake(word)


@compiled("qqq")
def slot(frame: int, rank: int, round_: int) -> int:
    """Return the address of the memory that ``rank`` uses for ``round_`` in the input channel.

    Call this function only after ``reserve`` for the same round.
    """
    return read(frame + INPUTS) + rank * read(frame + RING) + read(frame + PLACES + 8 * (round_ % ROUNDS))


@compiled("qq")
def result(frame: int, round_: int) -> int:
    """Return the address of the memory to which all ranks write their results of ``round_``.

    Call this function only after ``reserve`` for the same round in the channel RESULT.
    """
    return read(frame + RESULTS) + read(frame + PLACES + 8 * (RESULT * ROUNDS + round_ % ROUNDS))


@compiled("qqq", "")
def next_round(frame: int, channel: int, rounds: int) -> None:
    """Add ``rounds`` to the number of finished rounds of ``channel``, which this rank stores in its private memory."""
    write(frame + IN_USED + 8 * channel, read(frame + IN_USED + 8 * channel) + rounds)


@compiled(SHM.functions["ddl_barrier"])
def ddl_barrier(frame: int) -> int:
    """Wait until every rank has called this function.

    Return 0, or HERE or BY_PEER if the communicator was aborted.
    """
    first = read(frame + IN_USED)
    publish(frame, INPUT)
    next_round(frame, INPUT, 1)
    return wait_all(frame, INPUT, first + 1)


@compiled(SHM.functions["ddl_abort"])
def ddl_abort(frame: int) -> int:
    """Abort the communicator: all present and later calls on all ranks fail, and sleeping threads wake up.

    Any thread may call this function. Return 0.
    """
    store_word(frame + ABORTED, 1)
    store_word(read(frame + HEADER), 1 + read(frame + RANK))
    for r in range(read(frame + SIZE)):
        for channel in range(2):
            futex_wake(_counter(frame, r, channel))
    return 0
