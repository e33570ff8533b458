"""Four ranks, which are threads of this process, abort in the middle of a large call, three times."""

from __future__ import annotations

import sys
import time

import numpy as np
from ddl_conform.group import TransportGroup
from ddl_gloo import transport as module

from ddlcore.contracts.transport import Transport, Work
from ddlcore.errors import TransportError
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.types import Buffer, DType, Member, ReduceOp

SIZE, COUNT = 4, 3_000_000  # every message is larger than the sockets' buffers
MOST_S = 1.0


def call(name: str, transport: Transport) -> Work:
    source, target = (np.ones(SIZE * COUNT, np.float32) for _ in range(2))
    whole, other = (
        Buffer(array.ctypes.data, array.size, DType.F32, array.shape, owner=array) for array in (source, target)
    )
    if name == "allreduce":
        return transport.allreduce(whole, whole, ReduceOp.Sum)
    return transport.alltoallv(whole, other, [[COUNT] * SIZE] * SIZE)


def play(name: str, rank: int, transport: Transport) -> None:
    """Start the call and abort it; rank 0 aborts first. Check that the call ends with a TransportError."""
    work = call(name, transport)
    time.sleep(0.005 if rank == 0 else 0.02)
    transport.abort()
    begun_s = time.monotonic()
    try:
        while not work.wait(0.05):
            assert time.monotonic() - begun_s < MOST_S, f"rank {rank} still waits"
    except TransportError:
        return
    raise AssertionError("the call ended before it was aborted")


def main(name: str) -> None:
    module.CALM_S = 0.0  # messages on their way are cut, as when a peer dies
    members = [Member(rank, 0) for rank in range(SIZE)]
    for _ in range(3):
        transports = [module.GlooTransport() for _ in range(SIZE)]
        group = TransportGroup(transports, CpuKernels(), members=members, settings={}, deadline_s=20.0)
        group.open()
        group.run(lambda rank, transport: play(name, rank, transport))
        group.close()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
