"""Measures what lost ranks cost an elastic job on one host, and what elastic costs while no rank is lost.

    python tools/bench_elastic.py [--np 4] [--kills 50] [--rounds 9] [--seconds 290] [--faults 10]

Real jobs train with PyTorch, and ranks are killed by SIGKILL. A step waits for --compute-ms, as for an accelerator, and
then reduces half a megabyte. Three parts:

- --kills: one rank after the other is killed and comes back: how long until all survivors have completed a step, until
  the new process has completed one, and how long the others did nothing because it joined. The rank is started again at
  once, as after its first loss; ddl delays later starts (--restart-delay-s), which is not the cost of a loss.
- --rounds: jobs with elastic.run and --min-np take turns with jobs that have neither; the ratio of their median steps.
- --seconds, --faults: a job in which a rank is killed in every other window; together these windows last --seconds, and
  those without a fault as long, because a machine is not equally fast at all times. 62 faults in 30 minutes are one in
  29 s, as are 10 in 290 s. Kept are steps, as for a training whose global batch is constant; of the work of the ranks
  (steps times ranks), a lost rank of four takes a quarter until it is back.

A part whose number is 0 is left out. If a target is missed, the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds modules in its own folder only

from tools.elastic.job import Fault, Job, Rank, run
from tools.training.report import MISSES, aligned, spread, verdict

HEAD = ["what", "of", "measured", "target", "verdict"]


def row(what: str, of: str, value: float, limit: float | None, unit: str = " s", least: bool = False) -> list[str]:
    """Return a row of the table. ``least``: the limit is the lowest value that holds; otherwise the highest."""
    if limit is None:
        return [what, of, f"{value:.3f}{unit}", "", ""]
    holds = value >= limit if least else value <= limit
    sign = ">=" if least else "<="
    return [what, of, f"{value:.3f}{unit}", f"{sign} {limit:g}{unit}", "holds" if holds else MISSES]


def fault_rows(faults: Sequence[Fault]) -> list[list[str]]:
    """Return the rows of kills that were waited for one by one."""
    recovered = [one.recovered_s for one in faults]
    after_import = [one.back_s - one.import_s for one in faults]
    still = [one.still_s for one in faults]
    of = f"{len(faults)} kills"
    return [
        row("kill -9 to the survivors' next step", f"median of {of}", statistics.median(recovered), 0.5),
        row("", f"worst of {of}", max(recovered), 1.5),
        row("process start and imports", f"median of {of}", statistics.median(one.import_s for one in faults), None),
        row(
            "kill -9 to the new process's first step, without these",
            f"median of {of}",
            statistics.median(after_import),
            2,
        ),
        row("", f"worst of {of}", max(after_import), 2),
        row("others stand still while it joins", f"median of {of}", statistics.median(still), 0.5),
        row("", f"worst of {of}", max(still), 0.5),
    ]


def step_s(ranks: dict[int, Rank], size: int, after: int) -> float:
    """Return the median time of a step, of those after number ``after`` in a world of ``size`` ranks."""
    times = []
    for rank in ranks.values():
        moments = [moment for moment, number, there in rank.steps if number > after and there == size]
        times += [later - earlier for earlier, later in itertools.pairwise(moments)]
    return statistics.median(times)


def messages_each_step(ranks: dict[int, Rank]) -> float:
    """Return how many control messages the ranks together have sent a step, after the first count of each."""
    counted = [rank.messages for rank in ranks.values() if len(rank.messages) > 1]
    if not counted:
        raise RuntimeError("no rank has counted its control messages twice: the job was too short")
    return sum((last[1] - first[1]) / (last[0] - first[0]) for first, *_, last in counted)


def steady_rows(size: int, compute_ms: float, rounds: int, steps_s: float) -> list[list[str]]:
    """Run jobs of ``steps_s`` seconds in alternation, and return the rows of the steady step."""
    ratios: list[float] = []
    messages: list[float] = []
    for number in range(rounds):
        times: dict[str, float] = {}
        for way in ("plain", "elastic") if number % 2 else ("elastic", "plain"):
            with run(size, compute_ms, way) as job:
                job.wait_settled()
                time.sleep(steps_s)
                ranks = job.ranks()
            times[way] = step_s(ranks, size, after=50)
            if way == "elastic":
                messages.append(messages_each_step(ranks))
        ratios.append(times["elastic"] / times["plain"])
    ratio = spread(ratios)
    of = f"median of {rounds} [{ratio.low:.3f}, {ratio.high:.3f}]"
    first = ["steady step, elastic on over off", of, f"{ratio.median:.3f}", "<= 1.01", verdict(ratio, 1.01)]
    return [first, row("control messages a steady step", f"worst of {rounds}", max(messages), 0, "")]


def work(ranks: dict[int, Rank], begun_s: float, ended_s: float) -> tuple[int, int]:
    """Return how many steps the training has advanced between two moments, and how many steps all its ranks have done."""
    numbers: dict[int, int] = {}  # of each step, the ranks that it had
    for rank in ranks.values():
        numbers.update({number: size for moment, number, size in rank.steps if begun_s < moment <= ended_s})
    return len(numbers), sum(numbers.values())


@dataclass(frozen=True)
class Window:
    """A part of a job, from ``begun_s`` to ``ended_s``; in a disturbed one a rank was killed."""

    begun_s: float
    ended_s: float
    disturbed: bool


def pass_window(job: Job, length_s: float, disturbed: bool, chance: random.Random) -> Window:
    """Let the job train for ``length_s``; if ``disturbed``, kill a rank at a random moment of the first half of it.

    So all that the fault costs falls into this window.
    """
    job.wait_settled()
    begun_s = time.monotonic()
    if disturbed:
        time.sleep(chance.uniform(0, length_s / 2))
        job.kill(chance)
    time.sleep(max(0.0, begun_s + length_s - time.monotonic()))
    return Window(begun_s, begun_s + length_s, disturbed)


def kept(ranks: dict[int, Rank], windows: Sequence[Window]) -> list[list[str]]:
    """Return the rows of the throughput that disturbed windows keep, from pairs of windows that follow each other."""
    done = {window: work(ranks, window.begun_s, window.ended_s) for window in windows}
    disturbed = [done[window] for window in windows if window.disturbed]
    quiet = [done[window] for window in windows if not window.disturbed]
    of = f"{len(disturbed)} faults, one in {windows[0].ended_s - windows[0].begun_s:g} s"

    def percent(which: int) -> float:
        return 100 * sum(one[which] for one in disturbed) / sum(one[which] for one in quiet)

    each = spread([100 * one[0] / other[0] for one, other in zip(disturbed, quiet, strict=True)])
    return [
        row("throughput kept, in steps", f"{of} [{each.low:.1f}, {each.high:.1f}]", percent(0), 98, " %", least=True),
        row("throughput kept, in steps of ranks", of, percent(1), None, " %"),
    ]


def kept_rows(size: int, compute_ms: float, seconds: float, faults: int, chance: random.Random) -> list[list[str]]:
    """Run a job in which windows with and without a fault take turns, and return the rows of the throughput it keeps."""
    with run(size, compute_ms, "elastic") as job:
        windows = [
            pass_window(job, seconds / faults, disturbed, chance)
            for number in range(faults)
            for disturbed in ((False, True) if number % 2 else (True, False))
        ]
        job.wait_settled()  # a rank that was killed last is back: the job is stopped while all ranks train
        return kept(job.ranks(), windows)


def main() -> int:
    """Run the benchmark and return the exit status: 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=4, metavar="N", help="number of ranks")
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="ranks that are killed one by one")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="jobs of each kind for the steady step")
    parser.add_argument(
        "--round-s", type=float, default=5.0, metavar="S", help="seconds of steps in each of these jobs"
    )
    parser.add_argument(
        "--seconds", type=float, default=290.0, metavar="S", help="length of the windows with a fault, together"
    )
    parser.add_argument("--faults", type=int, default=10, metavar="N", help="ranks that are killed in these seconds")
    parser.add_argument("--compute-ms", type=float, default=20.0, metavar="MS", help="computation of a step")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="chooses the ranks and moments")
    parser.add_argument("--no-check", action="store_true", help="exit with 0 whatever is missed")
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    rows: list[list[str]] = []
    if asked.kills:
        with run(asked.np, asked.compute_ms, "elastic") as job:
            rows += fault_rows([job.cost_of_a_kill(chance) for _ in range(asked.kills)])
    if asked.rounds:
        rows += steady_rows(asked.np, asked.compute_ms, asked.rounds, asked.round_s)
    if asked.faults and asked.seconds:
        rows += kept_rows(asked.np, asked.compute_ms, asked.seconds, asked.faults, chance)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {os.cpu_count()} cores, load {load}, Python {platform.python_version()}"
    )
    print(f"{asked.np} ranks, {asked.compute_ms:g} ms of computation a step")
    print(aligned([HEAD, *rows]))
    return int(any(one[-1] == MISSES for one in rows) and not asked.no_check)


if __name__ == "__main__":
    sys.exit(main())
