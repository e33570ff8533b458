"""Define the layout of memory that is used both by the compiled kernels and by Python code. Offsets are in bytes."""

from __future__ import annotations

from typing import Final

from ddlcore.types import DType

ITEMSIZE: Final = tuple(dtype.itemsize for dtype in DType)

# The segment: a line for the communicator, a line for each rank, a ring for each rank, and the ring of results.
# The communicator's line contains the rank that aborted (1 + rank; 0: none), and the layout that rank 0 has chosen.
LAYOUT: Final = 64  # bytes of a slot, bytes of a ring
LINE: Final = 256  # bytes of a rank's counters
CHANNEL: Final = 128  # bytes between a rank's two counters: two cache lines, as processors fetch them in pairs
SLEEPERS: Final = 8  # after a counter: the number of threads that sleep until the counter changes
MARKS: Final = 16  # after an input counter: bit n % 64 says that its rank has entered round n without data
ROUNDS: Final = 64  # the number of rounds whose marks and places are kept
LEAST_SLOTS: Final = 4  # a ring has at least so many slots; the text at the top of channels.py says why
MOST_SLOTS: Final = 64

# A rank's frame: the words that only this rank uses.
RANK: Final = 0
SIZE: Final = 8
HEADER: Final = 16  # address of the segment
INPUTS: Final = 24  # address of the ranks' rings
RESULTS: Final = 32  # address of the ring of results, which all ranks share
CHUNK: Final = 40  # bytes of one slot, which limits the size of a round; a power of two
RING: Final = 48  # bytes of one ring: LEAST_SLOTS to MOST_SLOTS slots
SMALL: Final = 56  # up to this many bytes, every rank reduces all elements itself
SPINS: Final = 64
YIELDS: Final = 72
TIMEOUT: Final = 80  # a timespec: two words
IN_USED: Final = 96  # the number of finished rounds, one word per channel
IN_SEEN: Final = 112  # the value that all counters are known to have reached, one word per channel
ABORTED: Final = 128  # written by other threads, so it is alone in its cache line
CURSOR: Final = 192  # the place in the ring at which the next round begins, one word per channel
BEGUN: Final = 208  # 1: the first round of an allreduce is published, and another call will continue it
BEGUN_TENSOR: Final = 216  # the tensor at which that round ended, and the offset in it
BEGUN_OFFSET: Final = 224
LAST: Final = 256  # the last round in each slot, MOST_SLOTS words per channel
PLACES: Final = 1280  # the place of each of the last rounds in the ring, ROUNDS words per channel
TABLE: Final = 2304  # one word per rank: the source addresses of one reduction

# A plan describes one collective. A plan of an allreduce does not change between runs, except for TICKET, FINISHED and
# CODE. In a plan of a move, each run also has its own SOURCES, TARGETS and COUNTS: the addresses of the source and of the
# target themselves, and the counts of the collective, in bytes except for a reducescatter.
TENSORS: Final = 0  # of a move: GATHER, ALLTOALL or REDUCESCATTER
DTYPE: Final = 8
OP: Final = 16
TOTAL: Final = 24  # elements of all tensors
PRESCALE: Final = 32  # float64
POSTSCALE: Final = 40  # float64
SOURCES: Final = 48  # address of a table of addresses, one word per tensor
TARGETS: Final = 56  # address of another such table
FRAME: Final = 64  # address of the rank's frame
TICKET: Final = 72  # identifies the run; one run may need several calls of ddl_allreduce_try
FINISHED: Final = 80  # the ticket of the last run that has ended
CODE: Final = 88  # the return code of that run
COUNTS: Final = 96  # elements, one word per tensor

GATHER: Final = 0  # an allgather, or a broadcast, in which only the root's count is not 0
ALLTOALL: Final = 1
REDUCESCATTER: Final = 2
