"""Times what the release of device gradients costs in a step: by commit messages, by the device's event, or unchecked.

    python tools/bench_release.py [-np 2] [--backend gloo] [--compute-ms 0,5] [--steps 100] [--rounds 5] [--json FILE]

Ranks are processes with a pretend device each: host memory, and a thread that runs what is queued. A step queues a
backward pass that takes the given time there, starts eight gradients, waits for them and queues an optimizer step.
``unsafe`` releases gradients as soon as they are queued, which no training may do; the additional time of the other
ways is exposed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own path is tools/, not the tree's root

from ddl_conform.pretend import KIND, PretendRuntime
from ddl_conform.pretend_tensors import PretendTensor, stream
from ddl_conform.pretend_transport import PretendTransport
from ddl_conform.pretend_world import PRETEND, pretend_registry
from ddl_doctor.bench.pipe import told
from ddl_shm.transport import ShmTransport

from ddlcore.hooks import TransportProvider
from ddlcore.plug.registry import Distribution
from ddlcore.runtime.device.routes import Commit
from ddlcore.types import Device

__all__ = ["COMMIT", "EVENT", "UNSAFE", "OverShm", "table"]

COMMIT, EVENT, UNSAFE = "commit", "event", "unsafe"
GRADIENTS, ELEMENTS = 8, 4096
Row = Mapping[str, Any]


class OverShm(PretendTransport):
    """The pretend device's transport between processes of one host; the host memory uses another transport."""

    def __init__(self) -> None:
        self._inner = ShmTransport()  # type: ignore[assignment]  # it is used as a Transport


@contextmanager
def released(how: str) -> Iterator[None]:
    """Release buckets in the given way until the end of this context.

    Except for COMMIT no commit message is sent: either nobody knows that all ranks have launched (EVENT), or it is
    assumed (UNSAFE).
    """
    call = Commit.__call__
    try:
        if how != COMMIT:
            Commit.__call__ = lambda self, real: real and how == UNSAFE  # type: ignore[method-assign]
        yield
    finally:
        Commit.__call__ = call  # type: ignore[method-assign]


def rank_main(given: argparse.Namespace) -> None:
    """Run the benchmark on this rank; rank 0 writes the results to the pipe."""
    import ddlcore as ddl
    from ddlcore.api import current_job

    PretendRuntime.dawdle_s = 0.0
    ddl.init()
    job = current_job()
    offer(job.registry)
    runtime = PretendRuntime()
    runtime.open(Device(KIND, job.local_rank))
    with open(given.pipe, "w", encoding="utf-8", buffering=1) as file, stream(runtime):
        for compute_s in given.compute_s:
            rounds: dict[str, list[dict[str, float]]] = {how: [] for how in (UNSAFE, COMMIT, EVENT)}
            for _ in range(given.rounds + 1):
                for how, rows in rounds.items():
                    with released(how):
                        rows.append(step_times(job, compute_s, given.steps))
            for how, rows in rounds.items():
                if job.rank == 0:
                    whole = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
                    print(json.dumps({"how": how, "compute_ms": compute_s * 1e3, **whole}), file=file)
    ddl.shutdown()


def offer(registry: Any) -> None:
    """Add the pretend device's plugins to the registry of a job that has started but has not used a device."""
    shelf = pretend_registry()
    ours = Distribution("ddlcore", "pretend")
    registry.offer(shelf.kernels_for(KIND), ours)
    registry.offer(TransportProvider(KIND, f"{OverShm.__module__}:OverShm", devices=(KIND,)), ours)


def step_times(job: Any, compute_s: float, steps: int) -> dict[str, float]:
    """Return the microseconds of a step: all of it, the user's wait, the engine's commit messages, the device.

    Also return the number of commit messages of a step.
    """
    import numpy as np
    from ddl_conform.pretend_tensors import current_stream

    import ddlcore as ddl

    mine = current_stream()
    zeros = np.zeros(ELEMENTS, np.float32)
    tensors = [PretendTensor.of(zeros) for _ in range(GRADIENTS)]
    mine.record().wait(60.0)
    ddl.barrier()
    before, begun_s = job.stats(), time.perf_counter()
    for _ in range(steps):
        mine.call(lambda: time.sleep(compute_s))
        handles = [PRETEND.allreduce_async(one, output=one, name=f"g{i}") for i, one in enumerate(tensors)]
        for handle in handles:
            handle.wait()
        for one in tensors:
            one.change(lambda array: np.multiply(array, 0.5, out=array))
    mine.record().wait(60.0)
    ddl.barrier()  # the way in which the next round releases must not affect this round
    took_s, after = time.perf_counter() - begun_s, job.stats()

    def spent(stage: str) -> float:
        return float(after["seconds"][stage] - before["seconds"][stage]) / steps * 1e6

    messages = (after["commit_messages"] - before["commit_messages"]) / steps
    waits = {stage: spent(stage) for stage in ("user", "commit", "device")}
    return {"step": took_s / steps * 1e6, **waits, "messages": messages}


def table(rows: Sequence[Row]) -> list[str]:
    """Return a line for each way, with the additional time over the unsafe way with the same computation."""
    lines = [
        f"{'compute':>9} {'release':>8} {'step':>9} {'exposed':>9} {'in wait':>9} {'commit':>9} {'device':>9} {'messages':>9}"
    ]
    bare = {row["compute_ms"]: row["step"] for row in rows if row["how"] == UNSAFE}
    for row in sorted(rows, key=lambda row: (row["compute_ms"], row["how"])):
        exposed = row["step"] - bare[row["compute_ms"]]
        times = [row["step"], exposed, row["user"], row["commit"], row["device"]]
        cells = " ".join(f"{value:>6.0f} µs" for value in times)
        lines.append(f"{row['compute_ms']:>6g} ms {row['how']:>8} {cells} {row['messages']:>9.2f}")
    return lines


def run_ranks(given: argparse.Namespace, show: Callable[[Row], None]) -> None:
    """Start the ranks. Raises SystemExit if they fail."""
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "DDL_DEVICE_DENSE": KIND}
    with told(show) as pipe:
        launcher = [sys.executable, "-m", "ddlcore.launch", "run", "-np", str(given.np), "--backend", given.backend]
        rank = [sys.executable, __file__, *sys.argv[1:], "--pipe", pipe]
        code = subprocess.run([*launcher, *rank], env=environ).returncode
    if code:
        sys.exit(f"bench_release: the ranks ended with exit code {code}")


def arguments() -> argparse.Namespace:
    """Parse the arguments of the user or of a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, metavar="RANKS", help="default: %(default)s")
    parser.add_argument("--backend", default="gloo", help="between hosts' memories; default: %(default)s")
    parser.add_argument("--compute-ms", default="0,5", help="of a backward pass on the device; default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="of a round; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="whose median counts; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--pipe", help=argparse.SUPPRESS)
    given = parser.parse_args()
    try:
        given.compute_s = [float(word) / 1e3 for word in given.compute_ms.split(",")]
    except ValueError:
        parser.error(f"--compute-ms {given.compute_ms}: milliseconds with commas between them are needed")
    return given


def main() -> int:
    """Run the benchmark and return the exit code."""
    given = arguments()
    if given.pipe:
        rank_main(given)
        return 0
    rows: list[Row] = []
    run_ranks(given, rows.append)
    print(
        f"{given.np} ranks on pretend devices, {given.backend} between their hosts' memories; medians of rounds, by step"
    )
    print("\n".join(table(rows)))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
