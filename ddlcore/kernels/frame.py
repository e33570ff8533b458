"""Where things lie in the memory that the ring's machine code and its Python side share; offsets are in bytes."""

from __future__ import annotations

from typing import Final

__all__ = [
    "ABORTED",
    "BEGUN",
    "BEGUN_OFFSET",
    "BEGUN_TENSOR",
    "CHANNEL",
    "CHUNK",
    "CODE",
    "COUNTS",
    "CURSOR",
    "DTYPE",
    "FINISHED",
    "FRAME",
    "HEADER",
    "INPUTS",
    "IN_SEEN",
    "IN_USED",
    "LAST",
    "LAYOUT",
    "LEAST_SLOTS",
    "LINE",
    "MARKS",
    "MOST_SLOTS",
    "OP",
    "PLACES",
    "POSTSCALE",
    "PRESCALE",
    "RANK",
    "RESULTS",
    "RING",
    "ROUNDS",
    "SIZE",
    "SLEEPERS",
    "SMALL",
    "SOURCES",
    "SPINS",
    "TABLE",
    "TARGETS",
    "TENSORS",
    "TICKET",
    "TIMEOUT",
    "TOTAL",
    "YIELDS",
]

# The segment: a line for the communicator, a line a rank, then a ring a rank, then the ring of results.
# The communicator's line: who aborted (1 + rank), then how rank 0 laid out the rest.
LAYOUT: Final = 64  # bytes of a slot, bytes of a ring
LINE: Final = 256  # bytes of a rank's counters
CHANNEL: Final = 128  # between its two counters; two cache lines, since processors fetch them in pairs
SLEEPERS: Final = 8  # behind a counter: how many wait for it in the kernel
MARKS: Final = 16  # behind an input counter: bit n % 64 says that its rank came into round n without data
ROUNDS: Final = 64  # of how many rounds the marks and the places are kept
LEAST_SLOTS: Final = 4  # of a ring; the proof at the top of channels.py needs them
MOST_SLOTS: Final = 64

# A rank's frame: its private words.
RANK: Final = 0
SIZE: Final = 8
HEADER: Final = 16  # address of the segment
INPUTS: Final = 24  # address of the ranks' rings
RESULTS: Final = 32  # address of the ring of results, which all share
CHUNK: Final = 40  # bytes of one slot, the most that a round takes; a power of two
RING: Final = 48  # bytes of one ring: LEAST_SLOTS to MOST_SLOTS slots
SMALL: Final = 56  # up to so many bytes every rank reduces all by itself
SPINS: Final = 64
YIELDS: Final = 72
TIMEOUT: Final = 80  # a timespec: two words
IN_USED: Final = 96  # rounds behind us, a word a channel
IN_SEEN: Final = 112  # what every counter is known to have reached, a word a channel
ABORTED: Final = 128  # written by other threads, alone in its cache line
CURSOR: Final = 192  # where in the ring the next round begins, a word a channel
BEGUN: Final = 208  # 1: the first round of an allreduce is published, and its caller will come back for the rest
BEGUN_TENSOR: Final = 216  # how far that round went
BEGUN_OFFSET: Final = 224
LAST: Final = 256  # the last round in each slot, MOST_SLOTS words a channel
PLACES: Final = 1280  # where in the ring a round lies, ROUNDS words a channel
TABLE: Final = 2304  # a word a rank: addresses of one reduction

# A plan: what does not change from run to run.
TENSORS: Final = 0
DTYPE: Final = 8
OP: Final = 16
TOTAL: Final = 24  # elements of all tensors
PRESCALE: Final = 32  # float64
POSTSCALE: Final = 40  # float64
SOURCES: Final = 48  # address of a table of addresses, a word a tensor
TARGETS: Final = 56  # likewise
FRAME: Final = 64  # address of the rank's frame
TICKET: Final = 72  # which run the caller means, of those that it tries again and again
FINISHED: Final = 80  # the last of these that came to its end
CODE: Final = 88  # and how
COUNTS: Final = 96  # elements, a word a tensor
