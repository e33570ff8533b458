"""Checks the hierarchical transport against its targets, on a test cluster with limited link rates, against flat Gloo.

    python tools/bench_hierarchical.py [--only four,two,rate,interleaved] [--rounds 9] [--rate 1000] [--backend gloo]
                                       [--no-check] [--json F] [--markdown F]

Contenders take turns within one start of the ranks. Times are those of the slowest rank, and ratios are taken round by
round. A row misses its target only if its whole interval misses it; the exit code is then 1, unless --no-check is
given. It needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own path is tools/, not the tree's root

from ddl_doctor.bench.results import MeasuredRow, Ratio, interval_words, median_interval, ratio
from ddl_doctor.sizes import exact_size

from ddlcore.plug.settings import settings_of
from tools.bench_verdicts import Judged, machine_words, markdown, missed, put, table
from tools.crossing.rank import Contender, Spec
from tools.test_cluster import TestCluster, why_no_cluster

__all__ = ["PARTS", "Part", "judged", "main"]

TREE = Path(__file__).resolve().parents[1]
MIB = 1 << 20
FLAT, BOTH, LEADER, BF16 = "flat", "hierarchical", "one leader a host", "bfloat16"
START_S = 150.0


@dataclass(frozen=True)
class Target:
    """The target that ``contender`` takes at most ``at_most`` times as long as ``peer``.

    If it is not ``binding``, a miss is only reported and does not fail the check.
    """

    contender: str
    peer: str
    at_most: float | None
    binding: bool = True


@dataclass(frozen=True)
class Part:
    """One start of a number of ranks.

    ``least_rate``: the share of the links' rate that ``BOTH`` must use, if that is a target.
    """

    what: str
    hosts: tuple[int, ...]  # of each rank
    nbytes: int
    targets: tuple[Target, ...] = ()
    least_rate: float | None = None

    @property
    def contenders(self) -> list[str]:
        named = [BOTH, *(name for target in self.targets for name in (target.peer, target.contender))]
        return list(dict.fromkeys(named))


PARTS = {
    "four": Part(
        "4 ranks on each of 2 hosts",
        (0, 0, 0, 0, 1, 1, 1, 1),
        16 * MIB,
        # not binding: eight ranks cast on the cores of one machine, which two real hosts would not share
        (Target(BOTH, FLAT, 0.70), Target(LEADER, FLAT, None), Target(BF16, BOTH, 0.6, binding=False)),
    ),
    "two": Part(
        "2 ranks on each of 2 hosts",
        (0, 0, 1, 1),
        16 * MIB,
        (Target(BOTH, FLAT, 0.75), Target(LEADER, FLAT, None), Target(BF16, BOTH, 0.6)),
    ),
    "rate": Part("2 ranks on each of 2 hosts", (0, 0, 1, 1), 64 * MIB, least_rate=0.85),
    "interleaved": Part("2 hosts, ranks in turn", (0, 1, 0, 1), 16 * MIB, (Target(BOTH, FLAT, 0.4),)),
    "three": Part("2 ranks on each of 3 hosts", (0, 0, 1, 1, 2, 2), 16 * MIB, (Target(BOTH, FLAT, None),)),
}
PARTS_RUN = "four,two,rate,interleaved"


def judged(part: Part, row: MeasuredRow, rate_mbit: float) -> list[Judged]:
    """Return the measurements of a part with their targets."""
    size = exact_size(part.nbytes)
    rows = []
    for target in part.targets:
        ddl, peer = (f"{row.median_s(name) * 1e3:.0f} ms" for name in (target.contender, target.peer))
        what = f"{part.what}: {target.contender} over {target.peer}"
        measured = ratio(row, target.contender, target.peer)
        rows.append(Judged(what, size, ddl, peer, measured, target.at_most, at_least=False, binding=target.binding))
    if part.least_rate is not None:
        used = _rate_used(part, row, rate_mbit)
        ddl = f"{row.median_s(BOTH) * 1e3:.0f} ms"
        what = f"{part.what}: of the link's rate"
        rows.append(Judged(what, size, ddl, f"{rate_mbit:g} Mbit/s", used, part.least_rate, unit="of it"))
    return rows


def _rate_used(part: Part, row: MeasuredRow, rate_mbit: float) -> Ratio:
    """Return the time in which a link could send what each host must send at least, over the time that was measured."""
    hosts = len(set(part.hosts))
    least_s = 2 * (hosts - 1) / hosts * part.nbytes * 8 / (rate_mbit * 1e6)
    used = sorted(least_s / value for value in row.times[BOTH])
    return Ratio(used[len(used) // 2], *median_interval(used))


def measured(cluster: TestCluster, part: Part, rounds: int, backend: str, directory: Path) -> MeasuredRow:
    """Start the ranks on the hosts of ``cluster`` and return rank 0's results. Raises RuntimeError if a rank fails."""
    offered = {
        FLAT: Contender(backend),
        BOTH: Contender(f"shm+{backend}"),
        LEADER: Contender(f"shm+{backend}", {"hierarchical_shares": 1}),
        BF16: Contender(f"shm+{backend}", compressed=True),
    }
    contenders = {name: offered[name] for name in part.contenders}
    addresses = tuple(cluster.address(name) for name in cluster.names)
    directory.mkdir()
    spec = Spec(part.hosts, addresses, (part.nbytes,), contenders, rounds, str(directory))
    path = directory.with_suffix(".json")
    path.write_text(spec.to_json())
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TREE), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-m", "tools.crossing.rank"]
    ranks = [
        cluster.popen(cluster.names[host], [*words, path, str(rank)], env=env, stderr=subprocess.STDOUT)
        for rank, host in enumerate(part.hosts)
    ]
    told = [rank.communicate(timeout=START_S)[0] for rank in ranks]
    for number, (rank, words_) in enumerate(zip(ranks, told)):
        if rank.returncode:
            raise RuntimeError(f"rank {number} ended with {rank.returncode}: {words_}")
    return MeasuredRow.from_json(json.loads(told[0].splitlines()[-1]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=PARTS_RUN, help=f"some of {','.join(PARTS)} [default {PARTS_RUN}]")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rate", type=float, default=1000.0, help="rate of each host's link, in Mbit/s")
    parser.add_argument("--backend", default="gloo", help="the transport across hosts, and the flat one")
    parser.add_argument("--no-check", action="store_true", help="exit with 0 whatever came out")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE", help="written between its marks, where it has them")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 1 if a target is missed, 2 if nothing could be measured."""
    given = _parser().parse_args(arguments)
    unknown = sorted(set(given.only.split(",")) - set(PARTS))
    _, registry = settings_of(os.environ)
    provider = registry.transports.get(given.backend)
    why = (
        f"--only: no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}" if unknown else why_no_cluster()
    )
    why = why or (f"no transport {given.backend}; `ddl info` has the line" if provider is None else "")
    why = why or (registry.missing(provider) if provider is not None else "")
    if why:
        print(f"bench_hierarchical: {why}", file=sys.stderr)
        return 2
    rows, raw = _measure_all([PARTS[name] for name in given.only.split(",")], given)
    about = [
        f"{given.rate:g} Mbit/s a link, float32, in place, {given.backend}; {given.rounds} rounds, "
        f"{interval_words(given.rounds)}; {machine_words()}."
    ]
    print("\n".join(["", *table(rows), "", *about]))
    if given.json:
        Path(given.json).write_text(json.dumps(raw, indent=1))
    if given.markdown:
        put(Path(given.markdown), [*markdown(rows), "", *about])
    return 1 if missed(rows) and not given.no_check else 0


def _measure_all(parts: Sequence[Part], given: argparse.Namespace) -> tuple[list[Judged], list[Mapping[str, object]]]:
    rows: list[Judged] = []
    raw: list[Mapping[str, object]] = []
    for number, part in enumerate(parts):
        print(f"{part.what}, {exact_size(part.nbytes)} …", file=sys.stderr, flush=True)
        with TestCluster(max(part.hosts) + 1, rate_mbit=given.rate) as cluster:
            row = measured(cluster, part, given.rounds, given.backend, cluster.directory / f"measured{number}")
        rows += judged(part, row, given.rate)
        raw.append({"what": part.what, "hosts": part.hosts, **row.as_json()})
    return rows, raw


if __name__ == "__main__":
    sys.exit(main())
