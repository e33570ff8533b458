"""Counters and slots in shared memory, for numba: publishing, waiting, aborting. It does not know what a slot contains.

**Channels.** Every rank owns a line of counters in the segment and a ring of slots. A collective is a number of rounds,
the same on every rank. In round n a rank *publishes*: it fills the round's place in its ring, if it has data for that
round, and adds one to its counter. Peers read the place when they see that the counter is greater than n. There are two
channels: one for input, one for partial results (allreduce of many ranks).

**Places.** A collective decides how many bytes of the ring a round takes, at most one slot. A round lies within one
slot, and small rounds share a slot. All ranks use the same number of bytes for a round, so its place is the same in all
rings, and every rank computes it without communication (``reserve``).

**No second counter is needed** to know when a slot may be filled again. In every collective of the ring, a rank
publishes round n only after it has read everything it needs from rounds up to n - 2. So when a rank's counter has
reached n + 1, the rank has finished with round n - 2, and a slot whose last round was m may be filled again when every
counter has reached m + 3. Peers can reach m + 3 without further action of ours once we have published round m + 2; so a
ring needs at least 4 slots. A rank does not wait at the end of a collective: its slots stay filled for slower peers. By
the same rule, the bits that mark ranks without data are kept for ROUNDS rounds.

This module is imported only while compiling. All arguments are int64; ``frame`` is the address of the rank's private
memory, see frame.py.
"""

from __future__ import annotations

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
from ddlcore.kernels.functions import FUNCTIONS
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

INPUT, RESULT = 0, 1  # channels
PLACE_BYTES = 128  # the bytes of a round are rounded up to a multiple of two cache lines
LATER = 4  # return code: not all ranks have arrived yet
HERE, BY_PEER = 1, 2  # return codes: aborted by this rank itself, or by a peer


@compiled("qqq")
def _counter(frame: int, rank: int, channel: int) -> int:
    """Return the address of the counter of ``rank`` in ``channel``."""
    return read(frame + HEADER) + (1 + rank) * LINE + channel * CHANNEL


@compiled("q")
def aborted(frame: int) -> int:
    """Return who has aborted this communicator: HERE if this rank has, BY_PEER if another rank has, otherwise 0."""
    if load_word(frame + ABORTED) != 0:
        return HERE
    return BY_PEER if load_word(read(frame + HEADER)) != 0 else 0


@compiled("qqqq")
def _wait_slowly(frame: int, word: int, value: int, sleeps: int) -> int:
    """Wait until the counter at ``word`` has reached ``value``: spin for microseconds, then yield the core, then sleep.

    It must not spin for long, because the peer may need this core. It returns LATER after ``sleeps`` sleeps; with -1,
    it waits without a limit. Return 0, or another value if the communicator was aborted.
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
    # Going to sleep must not miss a wake-up. ``publish`` adds to the counter first and then reads SLEEPERS; this code
    # adds to SLEEPERS first and then reads the counter. All four accesses are sequentially consistent, so at least one
    # side sees the other: either we see the new counter and do not sleep, or the publisher sees a sleeper and wakes us.
    # If it publishes between our look and the system call, the futex finds that the word is no longer ``seen`` and
    # returns at once. (A futex compares 32 bits; 2^32 rounds cannot pass in that gap.) An abort changes no counter, so
    # its wake-up can be missed in the same gap. That is why every sleep has a timeout, after which the loop checks for
    # an abort again.
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

    Return 0, or another value if the communicator was aborted.
    """
    word = _counter(frame, rank, channel)
    if load_word(word) >= value:
        return 0
    return _wait_slowly(frame, word, value, -1)


@compiled("qqqq")
def wait_a_while(frame: int, channel: int, value: int, sleeps: int) -> int:
    """Wait as ``wait_all`` does, but return LATER after ``sleeps`` sleeps in the wait for one of the ranks."""
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
    """Wait until every rank's counter in ``channel`` has reached ``value``.

    Return 0, or another value if the communicator was aborted.
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
    """Choose a place of ``nbytes`` for ``round_`` in the ring, and wait until no peer reads that place any more.

    Every rank calls this for the same rounds, in order, with the same ``nbytes``, at most the size of a slot. Return 0,
    or another value if the communicator was aborted.
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
    """Set or clear the bit that tells peers whether this rank has no data (``idle``) for the bucket that begins with
    ``round_``.

    Peers see the bit when the round is published. ROUNDS rounds ago, the same bit had another meaning; so first wait
    until no peer reads that any more, which is rarely necessary. Return 0, or another value if the communicator was
    aborted.
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

    Call this after ``wait_all`` for the round.
    """
    for r in range(read(frame + SIZE)):
        if (load_word(_counter(frame, r, INPUT) + MARKS) >> (round_ % ROUNDS)) & 1:
            return 1
    return 0


@compiled("qq", "")
def publish(frame: int, channel: int) -> None:
    """Publish what this rank has written: add one to its counter in ``channel``, and wake the threads that wait for
    that.

    A peer that sees the new value also sees everything that this rank wrote before.
    """
    word = _counter(frame, read(frame + RANK), channel)
    add_word(word, 1)
    if load_word(word + SLEEPERS) > 0:
        futex_wake(word)


@compiled("qqq")
def slot(frame: int, rank: int, round_: int) -> int:
    """Return the address of the memory that ``rank`` uses for ``round_`` in the input channel.

    Call this after ``reserve``.
    """
    return read(frame + INPUTS) + rank * read(frame + RING) + read(frame + PLACES + 8 * (round_ % ROUNDS))


@compiled("qq")
def result(frame: int, round_: int) -> int:
    """Return the address of the memory to which all ranks write their results of ``round_``.

    Call this after ``reserve``.
    """
    return read(frame + RESULTS) + read(frame + PLACES + 8 * (RESULT * ROUNDS + round_ % ROUNDS))


@compiled("qqq", "")
def next_round(frame: int, channel: int, rounds: int) -> None:
    """Add ``rounds`` to the number of finished rounds of ``channel``.

    ``frame`` is the address of this rank's private memory, which has that number.
    """
    write(frame + IN_USED + 8 * channel, read(frame + IN_USED + 8 * channel) + rounds)


@compiled(FUNCTIONS["ddl_barrier"])
def ddl_barrier(frame: int) -> int:
    """Wait until every rank has called this. Return 0, or another value if the communicator was aborted."""
    first = read(frame + IN_USED)
    publish(frame, INPUT)
    next_round(frame, INPUT, 1)
    return wait_all(frame, INPUT, first + 1)


@compiled(FUNCTIONS["ddl_abort"])
def ddl_abort(frame: int) -> int:
    """Make all ranks' calls fail, those in progress and all later ones, and wake the threads that sleep.

    Any thread may call this.
    """
    store_word(frame + ABORTED, 1)
    store_word(read(frame + HEADER), 1 + read(frame + RANK))
    for r in range(read(frame + SIZE)):
        for channel in range(2):
            futex_wake(_counter(frame, r, channel))
    return 0
