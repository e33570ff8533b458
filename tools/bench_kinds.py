"""Checks the whole call of every kind of collective against the transport alone, and against torch's Gloo.

    python tools/bench_kinds.py [--rounds 15] [--no-check] [--markdown FILE] [options of `ddl bench`, such as -np 4]
    python tools/bench_kinds.py --hosts 4 [--rate 1000] …    one rank on each host of a test cluster; it needs root

`ddl bench` measures; all contenders take turns in one run. Small tensors: a target is the time that the whole call takes
beyond the transport. Large ones: the share of the transport's bandwidth. A row misses its target only if its whole
interval (95 %, of the median over the rounds) misses it; the exit code is then 1, unless --no-check is given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own path is tools/, not the tree's root

from ddl_doctor.bench.plan import OPERATIONS
from ddl_doctor.bench.results import TRANSPORT, WHOLE, MeasuredRow, Ratio, interval_words, median_interval, ratio
from ddl_doctor.sizes import exact_size

from tools.bench_verdicts import Judged, concluded, machine_words, markdown, put, table
from tools.test_cluster import TestCluster, why_no_cluster

__all__ = ["judged", "main"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = "8,1K,16K,1M,16M,64M"
GLOO = "gloo"
SMALL, LARGE = 16 * KIB, MIB  # bytes: up to the first, time beyond the transport; from the second on, bandwidth
MOST_US = 15.0
MOST_US_OF = {"allgather": 20.0, "alltoall": 20.0}  # whose ranks may send different numbers of rows
LEAST_SHARE = 0.92
OVER_GLOO = {8: 10.0, MIB: 4.0, 16 * MIB: 2.0}


def judged(rows: Sequence[MeasuredRow]) -> list[Judged]:
    """Return the lines of the table: of each kind and size against the transport, then the same against Gloo."""
    return [_beside_transport(row) for row in rows if TRANSPORT in row.times and not SMALL < row.nbytes < LARGE] + [
        _beside_gloo(row) for row in rows if GLOO in row.times
    ]


def _beside_transport(row: MeasuredRow) -> Judged:
    times = (_us(row, WHOLE), _us(row, TRANSPORT))
    if row.nbytes > SMALL:
        share = ratio(row, TRANSPORT, WHOLE)
        return Judged(f"{row.operation}, of the transport's rate", exact_size(row.nbytes), *times, share, LEAST_SHARE)
    beyond = [(whole - alone) * 1e6 for whole, alone in zip(row.times[WHOLE], row.times[TRANSPORT])]
    measured = Ratio(statistics.median(beyond), *median_interval(beyond))
    most = MOST_US_OF.get(row.operation, MOST_US)
    return Judged(f"{row.operation}, beyond the transport", exact_size(row.nbytes), *times, measured, most, "µs", False)


def _beside_gloo(row: MeasuredRow) -> Judged:
    target = OVER_GLOO.get(row.nbytes)
    what = f"{row.operation} against Gloo"
    return Judged(what, exact_size(row.nbytes), _us(row, WHOLE), _us(row, GLOO), ratio(row, GLOO, WHOLE), target)


def _us(row: MeasuredRow, name: str) -> str:
    return f"{row.median_s(name) * 1e6:.1f} µs"


def measured(rounds: int, options: Sequence[str], cluster: TestCluster | None) -> list[MeasuredRow]:
    """Return what `ddl bench` measures with ``options``, on this machine or on the hosts of ``cluster``.

    Raises SystemExit if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        where = ["-np", "2"] if cluster is None else ["-H", ",".join(f"{name}:1" for name in cluster.names)]
        usual = [*where, "--against", GLOO, "--ops", ",".join(OPERATIONS), "--sizes", SIZES, "--rounds", str(rounds)]
        command = [sys.executable, "-m", "ddlcore.launch", "bench", *usual, *options, "--json", str(file)]
        environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if cluster is None:
            code = subprocess.run(command, stdout=sys.stderr, env={**os.environ, **environ}).returncode
        else:
            code = cluster.popen(cluster.names[0], command, env=environ, stdout=sys.stderr, stderr=None).wait()
        if code:
            sys.exit(f"bench_kinds: `ddl bench` ended with exit code {code}")
        return [MeasuredRow.from_json(row) for row in json.loads(file.read_text())["rows"]]


def main() -> int:
    """Run the benchmark and return the exit code: 1 if a row misses its target, 2 if no test cluster is possible."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=15, help="alternations; default: %(default)s")
    parser.add_argument("--hosts", type=int, metavar="N", help="one rank on each of N hosts of a test cluster")
    parser.add_argument("--rate", type=float, default=1000.0, metavar="MBIT", help="of each host's link [%(default)g]")
    parser.add_argument("--no-check", action="store_true", help="exit 0 whatever was measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there, for documents")
    given, options = parser.parse_known_args()
    if given.hosts and (why := why_no_cluster()):
        print(f"bench_kinds: {why}", file=sys.stderr)
        return 2
    with TestCluster(given.hosts, rate_mbit=given.rate) if given.hosts else contextlib.nullcontext() as cluster:
        rows = judged(measured(given.rounds, options, cluster))
    places = [f"--hosts {given.hosts} --rate {given.rate:g}"] if given.hosts else []
    words = " ".join(["python tools/bench_kinds.py", *places, f"--rounds {given.rounds}", *options])
    about = f"`{words}` on {machine_words()}; medians, [{interval_words(given.rounds)}]."
    print("\n".join([about, *table(rows)]))
    if given.markdown:
        put(given.markdown, [about, "", *markdown(rows)], "kinds on hosts" if given.hosts else "kinds")
    return concluded(rows, not given.no_check)


if __name__ == "__main__":
    sys.exit(main())
