"""Times the calls of torch.distributed on a group of the backend ddl and on one of Gloo, on this host.

    python tools/bench_process_group.py [--rounds 15] [--np 2] [--kinds all_reduce,…] [--sizes 4,1M,…] [--no-check]
                                        [--markdown FILE]

All contenders take turns in the same processes. A row misses its target only if its whole interval (95 %, of the median
over the rounds) misses it; the exit code is then 1, unless --no-check is given. For the smallest all_reduce, the tool
also measures ddl's own verb, and a group that does nothing: what torch itself costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own path is tools/, not the tree's root

from ddl_doctor.bench.plan import parse_sizes
from ddl_doctor.bench.results import Ratio, interval_words, median_interval
from ddl_doctor.sizes import exact_size

from tools.bench_verdicts import LITTLE_ROOM, Judged, concluded, machine_words, markdown, put, table
from tools.training.meeting import Meeting, room

__all__ = ["judged", "main", "measure"]

KINDS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "barrier")
SIZES = "4,16K,1M,16M,64M"
DDL, GLOO, VERB, TORCH = "ddl", "gloo", "ddl's own verb", "torch alone"
SMALL, LARGE = 16 << 10, 1 << 20  # bytes: up to the first and from the second on, there are targets
OVER_SMALL, OVER_LARGE, MOST_US = 8.0, 3.0, 10.0
BLOCK_S, LEAST, MOST, WARM = (
    0.05,
    3,
    500,
    24,
)  # seconds and calls of a contender's turn; calls before it that are not timed

Times = dict[
    tuple[str, int], dict[str, list[float]]
]  # by kind and bytes, and by contender: seconds of a call, by round


def measure(kinds: list[str], sizes: list[int], rounds: int, place: str) -> Times:
    """Return the times of this rank's calls; every rank calls this with the same arguments.

    ``place``: the path by which the ranks meet.
    """
    import ddl_torch
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ddl_torch.init()
    dist.init_process_group("gloo")
    meet = Meeting(dist.get_rank(), dist.get_world_size(), place)
    groups: dict[str, Any] = {DDL: dist.new_group(backend="ddl"), GLOO: dist.group.WORLD}
    times: Times = {}
    for kind in kinds:
        for nbytes in sizes if kind != "barrier" else sizes[:1]:
            calls = {name: _call(kind, nbytes, group) for name, group in groups.items()}
            if (kind, nbytes) == ("all_reduce", sizes[0]):
                tensor = torch.zeros(nbytes // 4)
                calls[VERB] = partial(ddl_torch.allreduce_, tensor, op=ddl_torch.Sum, name="verb")
                calls[TORCH] = _call(kind, nbytes, _does_nothing(groups[DDL]))
            times[kind, nbytes] = _in_turns(calls, rounds, meet)
    dist.destroy_process_group()
    ddl_torch.shutdown()
    return times


def _does_nothing(group: Any) -> Any:
    """Return a group like ``group`` whose allreduce ends at once."""
    import torch.distributed as dist
    from ddl_torch.distributed.work import DONE

    pretended = dist.new_group(backend="ddl")
    pretended.allreduce = lambda *_: DONE
    return pretended


def _call(kind: str, nbytes: int, group: Any) -> Callable[[], Any]:
    """Return a call of ``kind`` in which each rank has ``nbytes`` bytes before it, or after it if it gathers them."""
    import torch
    import torch.distributed as dist

    if kind == "barrier":
        return lambda: dist.barrier(group=group)
    size = dist.get_world_size()
    whole = torch.zeros(max(nbytes // 4 // size, 1) * size)
    part, other = torch.zeros(whole.numel() // size), torch.zeros_like(whole)
    single = getattr(dist, kind.replace("_into_tensor", "_single").replace("_tensor", "_single"), None)  # its new name
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather_into_tensor": lambda: (single or dist.all_gather_into_tensor)(whole, part, group=group),
        "reduce_scatter_tensor": lambda: (single or dist.reduce_scatter_tensor)(part, whole, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(other, whole, group=group),
    }[kind]


def _in_turns(calls: dict[str, Callable[[], Any]], rounds: int, meet: Meeting) -> dict[str, list[float]]:
    """Return the seconds of each call, by round: the mean of the ranks."""
    counts = {}
    for name, call in calls.items():
        _timed(call, WARM)
        counts[name] = max(LEAST, min(MOST, round(BLOCK_S / max(meet.of_ranks(_timed(call, LEAST))))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            _timed(call, min(WARM, counts[name]))
            meet()
            times[name].append(statistics.fmean(meet.of_ranks(_timed(call, counts[name]))))
    return times


def _timed(call: Callable[[], Any], count: int) -> float:
    begun_s = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun_s) / count


def judged(times: Times) -> list[Judged]:
    """Return the lines of the table."""
    rows = []
    for (kind, nbytes), of in times.items():
        ratios = [gloo / ddl for gloo, ddl in zip(of[GLOO], of[DDL])]
        target = OVER_SMALL if nbytes <= SMALL else OVER_LARGE if nbytes >= LARGE else None
        measured = Ratio(statistics.median(ratios), *median_interval(ratios))
        rows.append(Judged(f"{kind} against Gloo", exact_size(nbytes), _us(of[DDL]), _us(of[GLOO]), measured, target))
        if VERB in of:
            alone_us = statistics.median(of[TORCH]) * 1e6
            beyond = [(group - verb) * 1e6 for group, verb in zip(of[DDL], of[VERB])]
            measured = Ratio(statistics.median(beyond), *median_interval(beyond))
            how: Any = {"unit": "µs", "at_least": False, "bounded": alone_us > LITTLE_ROOM * MOST_US}
            what = f"{kind} beyond {VERB}; {TORCH}: {alone_us:.1f} µs"
            rows.append(Judged(what, exact_size(nbytes), _us(of[DDL]), _us(of[VERB]), measured, MOST_US, **how))
    return rows


def _us(times_s: list[float]) -> str:
    return f"{statistics.median(times_s) * 1e6:.1f} µs"


def main() -> int:
    """Run the benchmark and return the exit code: 1 if a row misses its target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender; default: %(default)s")
    parser.add_argument("--np", type=int, default=2, help="ranks; default: %(default)s")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: all")
    parser.add_argument("--sizes", default=SIZES, help="bytes of a rank's larger tensor; default: %(default)s")
    parser.add_argument("--no-check", action="store_true", help="exit 0 whatever was measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there, for documents")
    given = parser.parse_args()
    from ddlcore import run

    kinds, sizes = given.kinds.split(","), list(parse_sizes(given.sizes))
    with room(given.np) as place:
        arguments = (kinds, sizes, given.rounds, place)
        times = run(measure, arguments, num_proc=given.np, env={"OMP_NUM_THREADS": "1"})[0]
    rows = judged(times)
    options = [f"--np {given.np}"] * (given.np != 2) + [f"--sizes {given.sizes}"] * (given.sizes != SIZES)
    words = " ".join(["python tools/bench_process_group.py", *options, f"--rounds {given.rounds}"])
    about = f"`{words}` on {machine_words()}; medians, [{interval_words(given.rounds)}]."
    print("\n".join([about, *table(rows)]))
    if given.markdown:
        put(given.markdown, [about, "", *markdown(rows)], "process group")
    return concluded(rows, not given.no_check)


if __name__ == "__main__":
    sys.exit(main())
