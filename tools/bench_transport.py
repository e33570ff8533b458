"""Compares one transport with the library that it uses: the same data, in alternation, through the transport interface.

    python tools/bench_transport.py gloo [-np 2] [--ops allreduce] [--sizes 64K,1M] [--dtype f32] [--rounds 15]
    python tools/bench_transport.py NAME --against module:Class --mpiexec --most 1.3

A ratio says how many times longer the transport takes than the bare library. A row misses only if its whole interval
(95 %, of the median over the rounds) is above ``--most``; the exit code is then 1, unless --no-check is given.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own path is tools/, not the tree's root

from ddl_doctor.bench.pipe import told
from ddl_doctor.bench.plan import BenchPlan, parse_dtype, parse_operations, parse_sizes
from ddl_doctor.bench.results import TRANSPORT, MeasuredRow, interval_words, ratio
from ddl_doctor.sizes import exact_size

from ddlcore.contracts.bench import BenchPeer
from ddlcore.plug.registry import Registry
from tools.bench_verdicts import Judged, concluded, machine_words, table
from tools.mpi_world import run_under_mpiexec

__all__ = ["STANDARD", "judged", "main"]

# For each transport, the defaults of the command line: the peer, whether mpiexec starts the ranks, and how many times
# longer the transport may take.
STANDARD: Mapping[str, tuple[str, bool, float]] = {
    "gloo": ("gloo", False, 1.1),
    "mpi": ("mpi", True, 1.3),
}
SIZES = "64K,256K,1M,4M,16M,64M"


def rank_main(given: argparse.Namespace) -> None:
    """Run the benchmark on this rank; rank 0 writes the results to the pipe."""
    from ddl_doctor.bench.rank import measure_all, open_peers

    import ddlcore.api as ddl

    ddl.init()
    job = ddl.current_job()
    peers = {"peer": peer_of(given.against, job.registry)}
    plan = BenchPlan(parse_operations(given.ops), parse_sizes(given.sizes), given.dtype, given.rounds, whole=False)
    with open(given.pipe if job.rank == 0 else os.devnull, "w", encoding="utf-8", buffering=1) as file:
        open_peers(job, peers)
        measure_all(job, plan, peers, lambda message: print(json.dumps(message), file=file))
        for peer in peers.values():
            peer.close()
    ddl.shutdown()


def peer_of(name: str, registry: Any) -> BenchPeer:
    """Return the peer called ``module:Class``, or the peer of that name from a plugin."""
    module, colon, kind = name.partition(":")
    if colon:
        made: BenchPeer = getattr(importlib.import_module(module), kind)()
        return made
    found: BenchPeer = registry.load(registry.named(Registry.bench_peers, name))()
    return found


def judged(transport: str, against: str, rows: Sequence[MeasuredRow], most: float) -> list[Judged]:
    """Return a line for each row that both contenders have."""
    found = []
    for row in rows:
        if TRANSPORT not in row.times or "peer" not in row.times:
            continue
        ours, theirs = (f"{row.median_s(name) * 1e6:.0f} µs" for name in (TRANSPORT, "peer"))
        what = f"{row.operation}, {transport} against {against}"
        measured = ratio(row, TRANSPORT, "peer")
        found.append(Judged(what, exact_size(row.nbytes), ours, theirs, measured, most, at_least=False))
    return found


def run_ranks(given: argparse.Namespace) -> list[MeasuredRow]:
    """Start the ranks and return what they measured. Raises SystemExit if they fail."""
    rows: list[MeasuredRow] = []

    def show(message: Mapping[str, Any]) -> None:
        if "row" in message:
            rows.append(MeasuredRow.from_json(message["row"]))
        if sys.stderr.isatty() and "begin" in message:
            print(f"\r\x1b[K{message['begin'][0]}, {exact_size(message['begin'][1])}", end="", file=sys.stderr)

    environ = {"OMP_NUM_THREADS": "1", **os.environ, "DDL_BACKEND": given.transport}
    with told(show) as pipe:
        rank = [sys.executable, __file__, *sys.argv[1:], "--pipe", pipe]
        if given.mpiexec:
            code = run_under_mpiexec(given.np, rank, environ)
        else:
            launcher = [sys.executable, "-m", "ddlcore.launch", "run", "-np", str(given.np)]
            code = subprocess.run([*launcher, *rank], env=environ).returncode
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if code:
        sys.exit(f"bench_transport: the ranks ended with exit code {code}")
    return rows


def arguments() -> argparse.Namespace:
    """Parse the arguments of the user or of a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transport", help="its name, as `ddl info` lists it")
    parser.add_argument("--against", metavar="PEER", help="a peer of `ddl bench`, or module:Class")
    parser.add_argument("--mpiexec", action="store_true", help="mpiexec starts the ranks")
    parser.add_argument("--most", type=float, help="how many times longer the transport may take")
    parser.add_argument("-np", type=int, default=2, metavar="RANKS", help="default: %(default)s")
    parser.add_argument("--ops", default="allreduce", help="default: %(default)s")
    parser.add_argument("--sizes", default=SIZES, help="bytes; default: %(default)s")
    parser.add_argument("--dtype", default="f32", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="alternations; default: %(default)s")
    parser.add_argument("--no-check", action="store_true", help="exit 0 whatever was measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times there")
    parser.add_argument("--pipe", help=argparse.SUPPRESS)
    given = parser.parse_args()
    against, mpiexec, most = STANDARD.get(given.transport, ("", False, 1.0))
    given.against = given.against or against
    given.mpiexec = given.mpiexec or (mpiexec and given.against == against)
    given.most = given.most or most
    if not given.against:
        parser.error(f"nothing stands beside {given.transport}; name a peer by --against")
    try:
        given.dtype = parse_dtype(given.dtype)
        parse_sizes(given.sizes)
        parse_operations(given.ops)
    except ValueError as error:
        parser.error(str(error))
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: at least one is needed")
    return given


def main() -> int:
    """Run the benchmark and return the exit code: 1 if a row misses."""
    given = arguments()
    if given.pipe:
        rank_main(given)
        return 0
    measured = run_ranks(given)
    rows = judged(given.transport, given.against, measured, given.most)
    print(f"{given.np} ranks, {given.dtype}, on {machine_words()}; medians, [{interval_words(given.rounds)}]")
    print("\n".join(table(rows)))
    if given.json:
        given.json.write_text(json.dumps([row.as_json() for row in measured], indent=1) + "\n")
    return concluded(rows, not given.no_check)


if __name__ == "__main__":
    sys.exit(main())
