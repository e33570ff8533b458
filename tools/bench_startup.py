"""Times a script with one allreduce from start to exit: `ddl run` against torchrun with Gloo, in alternation.

    python tools/bench_startup.py [--np 2] [--rounds 9]

Both are run once before the first round, so that files and compiled kernels are in place. The ratio is the median over
the rounds, with its 95 % interval. If the whole interval is above the target, the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds modules in its own folder only

from tools.training.report import MISSES, aligned, spread, verdict

FOLDER = Path(__file__).resolve().parent
TARGET = 1.10
TARGET_RANKS = 2
TIMEOUT_S = 120.0


def commands(ranks: int) -> dict[str, list[str]]:
    """Return the commands to time, by name, from the environment of this interpreter."""
    folder = Path(sys.executable).parent
    scripts = FOLDER / "startup"
    return {
        "ddl": [str(folder / "ddl"), "run", "-np", str(ranks), "python", str(scripts / "with_ddl.py")],
        "torchrun": [str(folder / "torchrun"), f"--nproc-per-node={ranks}", str(scripts / "with_gloo.py")],
    }


def seconds(command: list[str]) -> float:
    """Return the seconds that the command took. Raises CalledProcessError if it failed, after printing its output."""
    begun_s = time.perf_counter()
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    taken_s = time.perf_counter() - begun_s
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        done.check_returncode()
    return taken_s


def main() -> int:
    """Run the benchmark and return the exit status: 1 if the target is certainly missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, metavar="N", help="number of ranks")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="how often each is run")
    parser.add_argument("--no-check", action="store_true", help="exit with 0 whatever is missed")
    asked = parser.parse_args()
    timed = commands(asked.np)
    times: dict[str, list[float]] = {name: [] for name in timed}
    for command in timed.values():
        seconds(command)
    for number in range(asked.rounds):
        order = list(timed) if number % 2 else list(reversed(timed))
        for name in order:
            times[name].append(seconds(timed[name]))
    ratio = spread([ours / theirs for ours, theirs in zip(times["ddl"], times["torchrun"])])
    judged = verdict(ratio, TARGET) if asked.np == TARGET_RANKS else ""
    head = ["start to end", "ranks", "ddl s", "torchrun s", "ddl / torchrun", "95 % interval", "target", "verdict"]
    middle = [f"{statistics.median(times[name]):.2f}" for name in timed]
    interval = f"[{ratio.low:.3f}, {ratio.high:.3f}]"
    target = f"<= {TARGET:.2f}" if judged else ""
    print(aligned([head, ["one allreduce", str(asked.np), *middle, f"{ratio.median:.3f}", interval, target, judged]]))
    return int(judged == MISSES and not asked.no_check)


if __name__ == "__main__":
    sys.exit(main())
