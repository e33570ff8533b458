"""One rank of a communicator, as a process of its own; started by test_shm_processes.py."""

from __future__ import annotations

import array
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ddl_shm.transport import ShmTransport

from ddlcore.contracts.store import Store
from ddlcore.contracts.transport import Context, Plan
from ddlcore.errors import DeadlineExceeded, TransportError
from ddlcore.types import Buffer, DType, Member, ReduceOp


class FolderStore(Store):
    """Keys are files."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def set(self, key: str, value: bytes) -> None:
        temporary = self._folder / f".{key}.{os.getpid()}"
        temporary.write_bytes(value)
        temporary.rename(self._folder / key)

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                return (self._folder / key).read_bytes()
            except FileNotFoundError:
                time.sleep(0.005)
        raise DeadlineExceeded(key)

    def add(self, key: str, amount: int) -> int:
        raise NotImplementedError

    def delete(self, prefix: str) -> None:
        for path in self._folder.glob(f"{prefix}*"):
            path.unlink()


def _buffer(values: array.array[Any], dtype: DType) -> Buffer:
    return Buffer(values.buffer_info()[0], len(values), dtype, (len(values),), owner=values)


def check(transport: ShmTransport, rank: int, size: int) -> None:
    """Buckets of all lengths, gathers and broadcasts, with known answers."""
    for k, count in enumerate((1, 7, 1000, 50_000, 200_001) * 3):
        x = array.array("f", [rank + k]) * count
        y = array.array("f", [rank]) * 3
        addresses = [x.buffer_info()[0], y.buffer_info()[0]]
        transport.prepare(Plan((count, 3), DType.F32, ReduceOp.Sum, 1.0, 0.5)).start(addresses, addresses)
        total = sum(range(size))
        assert x == array.array("f", [(total + k * size) / 2]) * count
        assert y == array.array("f", [total / 2]) * 3
        mine, everything = array.array("i", [rank]) * (count + rank), array.array("i")
        for r in range(size):
            everything.extend(array.array("i", [r]) * (count + r))
        got = array.array("i", [-1]) * len(everything)
        transport.allgatherv(_buffer(mine, DType.I32), _buffer(got, DType.I32), [count + r for r in range(size)])
        assert got == everything
        values = array.array("d", [rank]) * count
        transport.broadcast(_buffer(values, DType.F64), k % size)
        assert values == array.array("d", [k % size]) * count


def reduce_until_told(transport: ShmTransport, rank: int, size: int) -> None:
    """Allreduces without end; a line on stdin aborts. Says how many seconds after that the call raised."""
    moment: list[float] = []

    def control() -> None:
        sys.stdin.readline()
        moment.append(time.monotonic())
        transport.abort()

    threading.Thread(target=control, daemon=True).start()
    x = array.array("f", [1]) * 300_000
    buffer = _buffer(x, DType.F32)
    print("running", flush=True)
    try:
        while True:
            transport.allreduce(buffer, buffer, ReduceOp.Max)
    except TransportError:
        print(time.monotonic() - moment[0] if moment else 0.0, flush=True)


def main(folder: str, rank: int, size: int, program: str) -> None:
    members = tuple(Member(r, 0) for r in range(size))
    unused: Any = None
    transport = ShmTransport()
    transport.open(Context(rank, members, FolderStore(folder), unused, {}, 30.0, "processes"))
    {"check": check, "reduce": reduce_until_told}[program](transport, rank, size)
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
