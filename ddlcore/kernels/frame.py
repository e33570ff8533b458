"""Where things lie in the memory that the ring's machine code and its Python side share; offsets are in bytes."""

from __future__ import annotations

from typing import Final

__all__ = [
    "ABORTED",
    "CHUNK",
    "COUNTS",
    "DTYPE",
    "HEADER",
    "IN_SEEN",
    "IN_USED",
    "LINE",
    "MARKS",
    "OP",
    "POSTSCALE",
    "PRESCALE",
    "RANK",
    "RESULTS",
    "SIZE",
    "SLEEPERS",
    "SLOTS",
    "SLOTS_AT",
    "SMALL",
    "SOURCES",
    "SPINS",
    "TABLE",
    "TARGETS",
    "TENSORS",
    "TIMEOUT",
    "TOTAL",
    "YIELDS",
]

# The segment: a line for the communicator, a line a rank, then the slots.
LINE: Final = 128  # bytes; two cache lines, since processors fetch them in pairs
SLEEPERS: Final = 8  # behind a counter: how many wait for it in the kernel
MARKS: Final = 16  # behind an input counter: SLOTS words, with what its rank came into the batch of that round
SLOTS: Final = 4  # of a rank and lane; the proof at the top of lanes.py needs at least 4

# A rank's frame: its private words.
RANK: Final = 0
SIZE: Final = 8
HEADER: Final = 16  # address of the segment
SLOTS_AT: Final = 24  # address of the ranks' input slots
RESULTS: Final = 32  # address of the shared result slots
CHUNK: Final = 40  # bytes of one slot
SMALL: Final = 48  # up to so many bytes every rank reduces all by itself
SPINS: Final = 56
YIELDS: Final = 64
TIMEOUT: Final = 72  # a timespec: two words
IN_USED: Final = 88  # rounds behind us, a word a lane
IN_SEEN: Final = 104  # what every counter is known to have reached, a word a lane
ABORTED: Final = 128  # written by other threads
TABLE: Final = 256  # a word a rank: addresses of one reduction

# A plan: what does not change from run to run.
TENSORS: Final = 0
DTYPE: Final = 8
OP: Final = 16
TOTAL: Final = 24  # elements of all tensors
PRESCALE: Final = 32  # float64
POSTSCALE: Final = 40  # float64
SOURCES: Final = 48  # address of a table of addresses, a word a tensor
TARGETS: Final = 56  # likewise
COUNTS: Final = 64  # elements, a word a tensor
