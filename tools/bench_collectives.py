"""Checks ddl's collectives on this host against their targets, relative to torch's Gloo and to MPI on the same data.

    python tools/bench_collectives.py [--only two,single,four,whole] [--rounds 15] [--no-check]
                                      [--json F] [--markdown F]

All values are float32, with one thread for each rank; the contenders take turns within one run. A row misses its target
only if its whole interval (95 %, of the median over the rounds) misses it; the exit code is then 1, unless --no-check
is given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own path is tools/, not the tree's root

from ddl_doctor.bench.pipe import told
from ddl_doctor.bench.plan import SIZES, BenchPlan, parse_sizes
from ddl_doctor.bench.results import TRANSPORT, MeasuredRow, Ratio, interval_words, median_interval, ratio
from ddl_doctor.bench.timing import Together
from ddl_doctor.sizes import exact_size

from ddlcore.contracts.transport import Plan
from ddlcore.plug.registry import Registry
from ddlcore.types import Sum
from tools.bench_verdicts import LITTLE_ROOM, Judged, concluded, machine_words, markdown, put, table
from tools.mpi_world import run_under_mpiexec, what_is_missing

__all__ = ["PARTS", "Part", "gloo_target", "judged", "judged_whole", "main", "mpi_target"]

KIB, MIB = 1 << 10, 1 << 20
NEAR_GBYTES_PER_S = 8.0  # the least rate of shm while two cores share a cache; it is about 5 if they do not
WHOLE_CALLS, IDLE_CALLS = 500, 25  # in one round
IDLE_S = 0.02
PASSES = "passes"


@dataclass(frozen=True)
class Part:
    """One start of a number of ranks."""

    what: str
    ranks: int
    peers: tuple[str, ...]
    mpi_threads: str = ""  # the thread level that is requested of MPI; "" without MPI


# With the level "multiple", which mpi4py requests by default, MPI takes a lock around each call.
PARTS = {
    "two": Part("2 ranks against Gloo and MPI", 2, ("gloo", "mpi"), "multiple"),
    "gloo": Part("2 ranks against Gloo", 2, ("gloo",)),
    "single": Part("2 ranks against MPI without threads", 2, ("mpi",), "single"),
    "four": Part("4 ranks against Gloo", 4, ("gloo", PASSES)),
    "whole": Part("the whole call, 2 ranks", 2, ()),
}


PARTS_RUN = "two,single,four,whole"


def gloo_target(nbytes: int) -> float:
    """Return how many times longer Gloo must take with two ranks, at least, for the target to hold."""
    return 50.0 if nbytes <= 16 * KIB else 25.0 if nbytes < 256 * KIB else 4.0


def mpi_target(nbytes: int) -> float:
    """Return how many times longer MPI must take, at least, for the target to hold."""
    return 1.3 if nbytes >= MIB else 1.0


# --- in the ranks


def rank_main(part: str, pipe: str, sizes: tuple[int, ...], rounds: int) -> None:
    """Run ``part`` on this rank; rank 0 writes the results to ``pipe``."""
    import ddl_torch as ddl
    import torch
    from ddl_doctor.bench.rank import measure_all, open_peers

    from ddlcore.api import current_job

    torch.set_num_threads(1)
    ddl.init()
    job = current_job()
    with open(pipe if job.rank == 0 else os.devnull, "w", encoding="utf-8", buffering=1) as file:

        def tell(message: Mapping[str, Any]) -> None:
            print(json.dumps(message), file=file)

        if part == "whole":
            tell({"begin": ["allreduce_", 4]})
            tell({"whole": whole_call(rounds)})
        else:
            peers = {name: peer_of(name, PARTS[part], job.registry) for name in PARTS[part].peers}
            open_peers(job, peers)
            measure_all(job, BenchPlan(("allreduce",), sizes, "float32", rounds, whole=False), peers, tell)
            for peer in peers.values():
                peer.close()
    ddl.shutdown()


def peer_of(name: str, part: Part, registry: Any) -> Any:
    """Return the peer of that name, from this directory or from a plugin.

    The MPI peer is told which thread level to request.
    """
    if name == PASSES:
        from tools.memory_passes import MemoryPasses

        return MemoryPasses()
    if name == "mpi":
        from ddl_mpi.peer import MpiPeer

        return MpiPeer(part.mpi_threads)
    return registry.load(registry.named(Registry.bench_peers, name))()


def whole_call(rounds: int) -> dict[str, Any]:
    """Return the seconds of ``ddl_torch.allreduce_`` on one float, back to back and after idling.

    Also return the share of replayed calls, and the seconds of the bare call.
    """
    import ddl_torch as ddl
    import torch

    from ddlcore.api import current_job

    job = current_job()
    together = Together(job.sets.communicator(0).transport)
    x = torch.zeros(1)

    def call() -> None:
        ddl.allreduce_(x, name="one")

    for _ in range(WHOLE_CALLS):
        call()
    before = job.stats()["buckets_replayed"]
    back = together.slowest([seconds(call, WHOLE_CALLS, together.barrier) for _ in range(rounds)])
    idle = [after_idling(call, together) for _ in range(rounds)]
    replayed = (job.stats()["buckets_replayed"] - before) / (rounds * (WHOLE_CALLS + IDLE_CALLS))
    bare = [after_idling(bare_call(x, job), together) for _ in range(rounds)]
    return {"back": back, "idle": idle, "replayed": replayed, "bare": bare}


def bare_call(x: Any, job: Any) -> Callable[[], None]:
    """Return a call of only what cannot be left out.

    It looks at the tensor's address, calls the transport, and counts the tensor's version.
    """
    from ddl_torch.autograd import OPERATIONS
    from torch.autograd.graph import increment_version

    buffer = OPERATIONS.adapter.buffer(x, elementwise=True)
    plan = Plan((1,), buffer.dtype, Sum, 1.0, 1.0 / job.size)
    prepared = job.sets.communicator(0).transport.prepare(plan)

    def call() -> None:
        address = OPERATIONS.adapter.address(x, buffer)
        prepared.run_atomic([address], [address], True)
        increment_version(x)

    call()
    return call


def seconds(call: Callable[[], None], repeat: int, barrier: Callable[[], None]) -> float:
    """Return the seconds of one call, measured back to back."""
    barrier()
    begun_s = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - begun_s) / repeat


def after_idling(call: Callable[[], object], together: Together) -> float:
    """Return the median seconds of calls that follow a pause, from the last rank's call to the last rank's return.

    A barrier lets the ranks begin together. But a rank that waits in it is woken about 0.1 ms later than the rank that
    comes last, so the time begins with the last rank's call.
    """
    begun, ended = [], []
    for _ in range(IDLE_CALLS):
        time.sleep(IDLE_S)
        together.barrier()
        begun.append(time.monotonic())
        call()
        ended.append(time.monotonic())
    return statistics.median(e - b for b, e in zip(together.slowest(begun), together.slowest(ended)))


# --- what follows


def judged(part: str, rows: Sequence[MeasuredRow]) -> list[Judged]:
    """Return the table's rows of one part, one peer after the other."""
    found = []
    for peer in PARTS[part].peers:
        for row in [row for row in rows if peer in row.times]:
            what, target = _what_and_target(part, peer, row.nbytes)
            bounded = target is not None and PASSES in row.times and _little_room(row, peer, target)
            found.append(_judged(row, peer, what, target, bounded=bounded))
        if part in ("two", "gloo") and peer == "gloo":
            near = [row for row in rows if row.nbytes >= 256 * KIB and row.gbytes_per_s(TRANSPORT) >= NEAR_GBYTES_PER_S]
            found += [_judged(row, peer, "… while the cores are near", 8.0, binding=False) for row in near]
    return found


def _little_room(row: MeasuredRow, peer: str, target: float) -> bool:
    """Return whether the passes over memory alone take most of the time in which the call would meet the target."""
    return row.median_s(PASSES) > LITTLE_ROOM * row.median_s(peer) / target


def _what_and_target(part: str, peer: str, nbytes: int) -> tuple[str, float | None]:
    if peer == PASSES:
        return "shm against its passes over memory, 4 ranks", None
    if part == "four":
        return "shm against Gloo, 4 ranks", 5.0
    if part == "single":
        return "shm against MPI without threads", None
    return ("shm against Gloo", gloo_target(nbytes)) if peer == "gloo" else ("shm against MPI", mpi_target(nbytes))


def _judged(
    row: MeasuredRow, peer: str, what: str, target: float | None, binding: bool = True, bounded: bool = False
) -> Judged:
    ours, theirs = (microseconds(row.median_s(name)) for name in (TRANSPORT, peer))
    measured = ratio(row, peer, TRANSPORT)
    return Judged(what, exact_size(row.nbytes), ours, theirs, measured, target, binding=binding, bounded=bounded)


def judged_whole(times: Mapping[str, Any]) -> list[Judged]:
    """Return the rows of the whole call, in µs."""
    rows = []
    idle = f"after {IDLE_S * 1000:g} ms idle"
    for name, what, most_us in (
        ("back", "ddl.allreduce_, back to back", 60.0),
        ("idle", f"ddl.allreduce_, {idle}", 120.0),
        ("bare", f"… without ddl in between, {idle}", None),
    ):
        values = [value * 1e6 for value in times[name]]
        measured = Ratio(statistics.median(values), *median_interval(values))
        ddl, peer = f"{measured.middle:.1f} µs", "–"
        if name == "bare":
            ddl, peer = peer, ddl
        bounded = name == "idle" and statistics.median(times["bare"]) * 1e6 > LITTLE_ROOM * (most_us or 0.0)
        rows.append(Judged(what, "4 B", ddl, peer, measured, most_us, "µs", False, bounded=bounded))
    return rows


def microseconds(value_s: float) -> str:
    """Return the time as the text of a table cell."""
    return f"{value_s * 1e6:.1f} µs"


def run_part(name: str, sizes: str, rounds: int) -> tuple[list[MeasuredRow], dict[str, Any]]:
    """Start the ranks of one part and return what they measured. Raises SystemExit if they fail."""
    part = PARTS[name]
    rows: list[MeasuredRow] = []
    whole: dict[str, Any] = {}

    def show(message: Mapping[str, Any]) -> None:
        if "begin" in message:
            status(f"{part.what}: {exact_size(message['begin'][1])}")
        elif "row" in message:
            rows.append(MeasuredRow.from_json(message["row"]))
        else:
            whole.update(message.get("whole", {}))

    status(f"{part.what}: starting")
    environ = {"DDL_REPLAY": "1", "OMP_NUM_THREADS": "1", **os.environ}
    with told(show) as pipe:
        rank = [sys.executable, __file__, "--rank-of", name, pipe, "--sizes", sizes, "--rounds", str(rounds)]
        if part.mpi_threads:
            code = run_under_mpiexec(part.ranks, rank, environ)
        else:
            launcher = [sys.executable, "-m", "ddlcore.launch", "run", "-np", str(part.ranks)]
            code = subprocess.run([*launcher, *rank], env=environ).returncode
    status("")
    if code:
        sys.exit(f"bench_collectives: the ranks of part {name} ended with exit code {code}")
    return rows, whole


def about(given: argparse.Namespace) -> list[str]:
    """Return what was run on which machine, for the documents."""
    words = ["python tools/bench_collectives.py", f"--rounds {given.rounds}"]
    words += [f"--only {given.only}"] if given.only != PARTS_RUN else []
    words += [f"--sizes {given.sizes}"] if given.sizes != SIZES else []
    return [f"`{' '.join(words)}` on {machine_words()}; medians, [{interval_words(given.rounds)}]."]


def status(text: str) -> None:
    """Show one line on a terminal, which the next one overwrites; show nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def chosen(words: str) -> list[str]:
    """Return the parts to run, without those that cannot run here, which are reported in a line.

    Raises SystemExit for a part that does not exist.
    """
    names = [word for word in words.split(",") if word]
    for name in names:
        if name not in PARTS:
            sys.exit(f"bench_collectives: --only {words}: '{name}' is not one of {', '.join(PARTS)}")
    missing = what_is_missing()
    if not missing or not any(PARTS[name].mpi_threads for name in names):
        return names
    print(f"not measured against MPI: {missing}")
    return [("gloo" if name == "two" else name) for name in names if name != "single"]


def arguments() -> argparse.Namespace:
    """Parse the arguments of the user or of a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=PARTS_RUN, metavar="PARTS", help="default: %(default)s")
    parser.add_argument("--sizes", default=SIZES, help="bytes, such as 4,64K,1M; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="alternations; default: %(default)s")
    parser.add_argument("--no-check", action="store_true", help="exit 0 whatever was measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there, for documents")
    parser.add_argument("--rank-of", nargs=2, metavar=("PART", "PIPE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    try:
        parse_sizes(given.sizes)
    except ValueError as error:
        parser.error(str(error))
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: at least one is needed")
    return given


def main() -> int:
    """Run the benchmark and return the exit code: 1 if a row misses its target."""
    given = arguments()
    if given.rank_of:
        part, pipe = given.rank_of
        rank_main(part, pipe, parse_sizes(given.sizes), given.rounds)
        return 0
    rows: list[Judged] = []
    times: dict[str, Any] = {}
    for name in chosen(given.only):
        measured, whole = run_part(name, given.sizes, given.rounds)
        new = judged_whole(whole) if name == "whole" else judged(name, measured)
        times[name] = whole or [row.as_json() for row in measured]
        rows += new
        words = f"{PARTS[name].what}: medians of {given.rounds} rounds, [{interval_words(given.rounds)}]"
        print("\n".join(["", words, *table(new)]))
        if whole and whole["replayed"] < 1:
            print(f"only {whole['replayed']:.0%} of the whole calls ran from memory")
        sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps(times, indent=1) + "\n")
    if given.markdown:
        put(given.markdown, [*about(given), "", *markdown(rows)])
    return concluded(rows, not given.no_check)


if __name__ == "__main__":
    sys.exit(main())
