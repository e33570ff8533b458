"""Large allreduces that use the same memory again, on ranks that do not agree about whose memory is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from ddl_conform.group import finish
from ddl_mpi import collectives as module
from ddl_mpi.transport import MpiTransport

import ddlcore as ddl
from ddlcore.api import current_job
from ddlcore.types import Buffer, DType, ReduceOp

COUNT = (256 << 10) // 4
CALLS = module.PERSIST_AFTER + 4


class Ranks:
    """The job's transport, called by this thread while the engine has nothing to do."""

    def __init__(self) -> None:
        ddl.init()
        self.rank, self.size = ddl.rank(), ddl.size()
        self.transport: Any = current_job().sets.communicator(0).transport
        assert isinstance(self.transport, MpiTransport)
        self.step = 0

    def reduce(self, source: Any, target: Any) -> None:
        """Make one allreduce and check its values. ``source`` must not change if ``target`` is another array."""
        self.step += 1
        source[:] = self.rank + self.step
        finish(self.transport.allreduce(_buffer(source), _buffer(target), ReduceOp.Sum))
        assert (target == sum(range(self.size)) + self.size * self.step).all(), (self.rank, self.step, target[:3])
        assert source is target or (source == self.rank + self.step).all()

    def persistent(self) -> int:
        """Return how many persistent requests this rank keeps."""
        return sum(not isinstance(kept, int) for kept in self.transport._collectives._requests.values())


def _buffer(array: Any) -> Buffer:
    return Buffer(array.ctypes.data, array.size, DType.F32, array.shape, owner=array)


def main() -> None:
    """Make the same calls on every rank; only the memory differs."""
    ranks = Ranks()
    same, other, third = (np.zeros(COUNT, np.float32) for _ in range(3))
    for _ in range(CALLS):
        ranks.reduce(same, same)
    assert ranks.persistent() == 1

    other[:] = -1
    for _ in range(CALLS):  # rank 0 uses other memory, so no rank may start its persistent request
        kept = same.copy()
        mine = other if ranks.rank == 0 else same
        ranks.reduce(mine, mine)
        assert ranks.rank or (same == kept).all()
    ranks.reduce(same, same)

    for _ in range(CALLS):  # in place on some ranks only
        ranks.reduce(same, same if ranks.rank % 2 else third)
    for _ in range(CALLS):  # on none
        ranks.reduce(same, third)

    module.REMEMBERED = 2
    arrays = [np.zeros(COUNT + i, np.float32) for i in range(4)]
    for _ in range(CALLS):
        for array in arrays:
            ranks.reduce(array, array)
    assert len(ranks.transport._collectives._requests) == 2
    for _ in range(CALLS):
        ranks.reduce(arrays[0], arrays[0])
    assert ranks.persistent() >= 1
    ddl.shutdown()
    print("done")


if __name__ == "__main__":
    main()
