"""Measures packing and unpacking on a GPU against the GPU's own copies and torch's; needs a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from ddl_nccl.cuda.queue import CudaQueue
from ddl_nccl.cuda.runtime import CudaDevice

from ddlcore.types import Device, DType
from tools.gpu.copies_asked import COPY_ROWS
from tools.gpu.rows import Row, number, tell

__all__ = ["main", "measure_copies"]

MIB = 1 << 20
TENSORS, BUCKET_BYTES = 160, 64 * MIB
ROTATED = 8  # buckets: 512 MiB of tensors and as much of packed memory, so that no cache holds them
ROUNDS = 15
SMALL_TENSORS, SMALL_BYTES, SMALL_REPEATS = 400, 16 << 10, 50
HOST_CALLS = 300
AHEAD_CYCLES = 200_000_000  # of the GPU's clock: keeps the GPU busy while more work is queued


class _Clock:
    """Times work on one stream by the device's clock, with a full queue, so that the host's share is not counted."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(AHEAD_CYCLES)
            begin.record(self._stream)
            for call in calls:
                call()
            end.record(self._stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def _tensors(n: int, nbytes: int, buckets: int) -> list[list[torch.Tensor]]:
    each = nbytes // n // 4
    return [[torch.randn(each, device="cuda") for _ in range(n)] for _ in range(buckets)]


def _buckets(queue: CudaQueue, clock: _Clock) -> Iterator[Row]:
    """Measure buckets of 64 MiB, with all contenders in turn in every round."""
    tensors = _tensors(TENSORS, BUCKET_BYTES, ROTATED)
    flats = [torch.empty(sum(t.numel() for t in bucket), device="cuda") for bucket in tensors]
    others = [torch.empty_like(flat) for flat in flats]
    views = [list(flat.split([t.numel() for t in bucket])) for flat, bucket in zip(flats, tensors)]
    counts = [t.numel() for t in tensors[0]]
    torch.cuda.synchronize()
    calls: dict[str, list[Callable[[], object]]] = {
        name: [] for name in ("pack", "unpack", "copy", "cat", "foreach", "foreach back")
    }
    for bucket, flat, other, parts in zip(tensors, flats, others, views):
        addresses, target = [t.data_ptr() for t in bucket], flat.data_ptr()
        pack = queue.packer(counts, DType.F32, DType.F32, 1.0)
        unpack = queue.unpacker(counts, DType.F32, DType.F32, 1.0)
        calls["pack"].append(lambda f=pack, a=addresses, t=target: f(a, t))  # type: ignore[misc]  # mypy has no type for a lambda's default
        calls["unpack"].append(lambda f=unpack, a=addresses, t=target: f(t, a))  # type: ignore[misc]  # mypy has no type for a lambda's default
        copied = (flat.data_ptr(), other.data_ptr(), BUCKET_BYTES)
        calls["copy"].append(lambda c=copied: queue.copy(*c))  # type: ignore[misc]  # mypy has no type for a lambda's default
        calls["cat"].append(lambda b=bucket, f=flat: torch.cat(b, out=f))  # type: ignore[misc]  # mypy has no type for a lambda's default
        calls["foreach"].append(lambda p=parts, b=bucket: torch._foreach_copy_(p, b))  # type: ignore[misc]  # mypy has no type for a lambda's default
        calls["foreach back"].append(lambda p=parts, b=bucket: torch._foreach_copy_(b, p))  # type: ignore[misc]  # mypy has no type for a lambda's default
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(ROUNDS + 1):  # the first is not timed
        for name, each in calls.items():
            spent = clock.seconds(each) / ROTATED
            if round_:
                seconds[name].append(spent)
    gigabytes = 2 * BUCKET_BYTES / statistics.median(seconds["copy"]) / 1e9
    print(f"device copy: {gigabytes:.0f} GB/s read and written; rotating over {2 * ROTATED * BUCKET_BYTES // MIB} MiB")
    over = (("pack", "copy"), ("unpack", "copy"), ("pack", "cat"), ("pack", "foreach"), ("unpack", "foreach back"))
    for (what, asked), (ours, theirs) in zip(COPY_ROWS, over):
        ratios = [peer / own for own, peer in zip(seconds[ours], seconds[theirs])]
        yield number(what, ratios, float(asked.split()[1]), "×", at_least=True)


def _small(queue: CudaQueue, clock: _Clock) -> Iterator[Row]:
    """Measure many small tensors: the time of one launch among many."""
    (bucket,) = _tensors(SMALL_TENSORS, SMALL_TENSORS * SMALL_BYTES, 1)
    counts, addresses = [t.numel() for t in bucket], [t.data_ptr() for t in bucket]
    flat = torch.empty(sum(counts), device="cuda")
    pack = queue.packer(counts, DType.F32, DType.F32, 1.0)
    unpack = queue.unpacker(counts, DType.F32, DType.F32, 1.0)
    runs: list[Callable[[], object]] = [
        lambda: pack(addresses, flat.data_ptr()),
        lambda: unpack(flat.data_ptr(), addresses),
    ]
    for (what, target), run in zip(COPY_ROWS[5:7], runs):
        values = [1e6 * clock.seconds([run] * SMALL_REPEATS) / SMALL_REPEATS for _ in range(ROUNDS + 1)]
        yield number(what, values[1:], float(target.split()[1]), "µs")


def _host(queue: CudaQueue) -> Iterator[Row]:
    """Measure the host's time for one bucket with new addresses each time: fence, pack, unpack, event."""
    buckets = _tensors(TENSORS, MIB, 2)
    counts = [t.numel() for t in buckets[0]]
    addresses = [[t.data_ptr() for t in bucket] for bucket in buckets]
    flat = torch.empty(sum(counts), device="cuda")
    pack = queue.packer(counts, DType.F32, DType.F32, 1.0)
    unpack = queue.unpacker(counts, DType.F32, DType.F32, 1.0)
    ready = torch.cuda.Event()
    ready.record()
    values = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for i in range(HOST_CALLS):
            queue.wait_for(ready.cuda_event)
            pack(addresses[i % 2], flat.data_ptr())
            unpack(flat.data_ptr(), addresses[i % 2])
            queue.record()
        values.append(1e6 * (time.perf_counter() - begun) / HOST_CALLS)
    what, target = COPY_ROWS[7]
    yield number(what, values[1:], float(target.split()[1]), "µs")


def measure_copies() -> Iterator[Row]:
    """Yield the rows of COPY_ROWS."""
    torch.cuda.init()
    device = CudaDevice()
    device.open(Device("cuda", 0))
    queue = device.queue()
    clock = _Clock(torch.cuda.ExternalStream(queue.handle))
    yield from _buckets(queue, clock)
    yield from _small(queue, clock)
    yield from _host(queue)
    queue.close(10.0)


def main() -> None:
    """Run as a program."""
    tell(measure_copies())


if __name__ == "__main__":
    main()
