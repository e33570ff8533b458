"""Measures what a timeline costs for each bucket and tensor, and whole steps with and without one, in alternation.

    python tools/bench_timeline.py [--np 2] [--rounds 15] [--no-steps] [--json FILE]

The costs are stores into the ring buffer and nanoseconds, for a tensor and for a bucket. The steps are those of a
replayed loop on ranks that this tool starts; a ratio is the median over the rounds, with its 95 % interval. The exit
status is 1 if a bucket costs more than 2 µs or a tensor more than one store (with --no-check: 0).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds modules in its own folder only

from ddl_doctor.bench.results import median_interval
from ddl_doctor.recording.ring_buffer import Record, RingBuffer
from ddl_doctor.recording.trace_hooks import TraceHooks

from ddlcore.messages.to_rank import Planned
from ddlcore.types import Kind

BUCKET_LIMIT_NS = 2000.0
STORES_LIMIT = 1.0
CALLS = 20_000
LOOPS = {"one small tensor": (1, 1024), "400 small tensors": (400, 1024), "8 tensors of 1 MiB": (8, 1 << 18)}
BLOCK_S = 0.25


class CountedSlots(list[Record | None]):
    """The slots of a ring buffer, which count the stores."""

    stores = 0

    def __setitem__(self, at: Any, value: Any) -> None:
        self.stores += 1
        super().__setitem__(at, value)


def _hooks() -> tuple[TraceHooks, RingBuffer]:
    ring = RingBuffer()
    return TraceHooks(ring, SimpleNamespace(pack_ns=0, unpack_ns=0, nbytes=[0] * len(Kind))), ring


def _calls(hooks: TraceHooks, tensors: int) -> dict[str, tuple[Callable[[], object], int, int]]:
    """Return the calls that a bucket causes, by name: the call, and for how many tensors and buckets it is made."""
    entries = [SimpleNamespace(set_id=0, name=f"t{i}", spec_bytes=b"") for i in range(tensors)]
    started = [(entry, 0, None) for entry in entries]
    planned = Planned(0, Kind.ALLREDUCE, tuple(entry.name for entry in entries), (b"",) * tensors)
    return {
        "a tensor, each by itself (again)": (lambda: hooks.submitted([started[0][0]], True), 1, 0),
        f"a tensor of {tensors} together (start_all)": (
            lambda: hooks.submitted([one[0] for one in started], True),
            tensors,
            0,
        ),
        "a tensor that is negotiated (submit)": (lambda: hooks.submitted(entries, False), tensors, 0),
        "a bucket (completed)": (lambda: hooks.completed(planned, 3, 1, 2), 0, 1),
        "a wait (waited)": (lambda: hooks.waited(1, 2), 0, 1),
    }


def costs(tensors: int = 400, calls: int = CALLS) -> dict[str, tuple[float, float]]:
    """Return (stores, ns) for each call, the best of five rounds."""
    found = {}
    hooks, ring = _hooks()
    for name, (call, for_tensors, for_buckets) in _calls(hooks, tensors).items():
        count = max(calls // max(for_tensors, 1), 10)
        best_ns = min(_timed(call, count) for _ in range(5)) / max(for_tensors, for_buckets)
        found[name] = (0.0, best_ns)
    hooks, ring = _hooks()
    counted = ring.slots = CountedSlots(ring.slots)
    for name, (call, for_tensors, for_buckets) in _calls(hooks, tensors).items():
        before = counted.stores
        call()
        found[name] = ((counted.stores - before) / max(for_tensors, for_buckets), found[name][1])
    return found


def _timed(call: Callable[[], object], count: int) -> float:
    begun_ns = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - begun_ns) / count


def steps(tensors: int, count: int, rounds: int, directory: str) -> tuple[list[float], list[float]]:
    """Return the seconds of a step without and with a timeline, by round. Every rank calls this."""
    import numpy as np

    import ddlcore as ddl
    from ddlcore.api import Operations, current_job
    from ddlcore.builtin.numpy_adapter import NumpyAdapter

    ddl.init()
    job, operations = current_job(), Operations(NumpyAdapter())
    grads = [np.ones(count, np.float32) for _ in range(tensors)]
    entries = [operations.persistent_allreduce(grad, name=f"g{i}", op=ddl.Max) for i, grad in enumerate(grads)]
    started = [(entry, grad.ctypes.data, grad) for entry, grad in zip(entries, grads)]

    def block(length: int) -> float:
        ddl.barrier()
        begun_s = time.perf_counter()
        for _ in range(length):
            job.start_all(started)
            for entry in entries:
                entry.wait()
        return (time.perf_counter() - begun_s) / length

    block(20)
    length = int(ddl.broadcast(np.array([max(5, round(BLOCK_S / block(20)))]), 0)[0])
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for on in (False, True) if number % 2 else (True, False):
            if on:
                ddl.start_timeline(f"{directory}/t{number}.json")
            block(length // 5 + 12)  # untimed: fills caches, and lets the period be found again
            found[on].append(block(length))
            if on:
                ddl.stop_timeline()
    ddl.shutdown()
    return found


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="turns with and without (15)")
    parser.add_argument("--loops", default=",".join(LOOPS), metavar="NAME,…", help="which of them (all)")
    parser.add_argument("--no-steps", action="store_true", help="only what a record costs")
    parser.add_argument("--no-check", action="store_true", help="exit with 0 whatever is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    asked = options(arguments)
    found = costs()
    for name, (stores, ns) in found.items():
        print(f"{name:50} {stores:6.4g} stores {ns:8.0f} ns")
    written: dict[str, Any] = {"costs": found, "steps": {}}
    for name in () if asked.no_steps else asked.loops.split(","):
        from ddlcore import run

        with tempfile.TemporaryDirectory() as directory:
            arguments_of = (*LOOPS[name], asked.rounds, directory)
            off, on = run(steps, arguments_of, num_proc=asked.np, env={"OMP_NUM_THREADS": "1"})[0]
        ratios = [one / other for one, other in zip(on, off)]
        low, high = median_interval(ratios)
        middle = statistics.median(ratios)
        print(
            f"{name:26} {statistics.median(off) * 1e6:9.1f} µs a step; with a timeline x {middle:.3f} [{low:.3f}, {high:.3f}]"
        )
        written["steps"][name] = {"off": off, "on": on}
    if asked.json is not None:
        asked.json.write_text(json.dumps(written, indent=1))
    missed = [
        name
        for name, (stores, ns) in found.items()
        if stores > STORES_LIMIT or ("bucket" in name and ns > BUCKET_LIMIT_NS)
    ]
    for name in missed:
        print(f"misses its limit: {name}")
    return int(bool(missed) and not asked.no_check)


if __name__ == "__main__":
    sys.exit(main())
