"""Times training of four models on this host: without communication, with a barrier, by DDP on Gloo, and by ddl.

Run: python tools/bench_training.py [--np 1,2,4] [--models wide,deep,gpt,resnet] [--rounds 15]

It starts its own ranks, with one torch thread each. All four train the same model in the same processes, in
alternation; a ratio is the median over the rounds, with its 95 % interval. Where the whole interval of a
ratio misses its target, the exit status is 1 (--no-check: 0).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, this file sees its own folder only

import ddlcore
from tools.training.contenders import Measured, measure
from tools.training.models import WORKLOADS
from tools.training.report import aligned, missed, ratio_rows, ratio_table, speed_table


def terminal() -> str:
    """The device on which progress may be shown; "" where stderr is none."""
    return os.ttyname(2) if sys.stderr.isatty() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", default="2", help="numbers of ranks, such as 1,2,4")
    parser.add_argument("--models", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-check", action="store_true", help="exit with 0 whatever is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    options = parser.parse_args()
    runs: list[Measured] = []
    rows = []
    for ranks in map(int, options.np.split(",")):
        for name in options.models.split(","):
            run = ddlcore.run(
                measure, (name, options.rounds, terminal()), num_proc=ranks, env={"OMP_NUM_THREADS": "1"}
            )[0]
            rows += ratio_rows(run)
            runs.append(run)
            print(
                f"\n{name}: {ranks} ranks, {run.tensors} tensors, {run.parameters / 1e6:.2f} M parameters, "
                f"{options.rounds} rounds of {run.steps} steps"
            )
            print(aligned(ratio_table(ratio_rows(run))))
            print(aligned(speed_table([run])), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    return int(missed(rows) and not options.no_check)


if __name__ == "__main__":
    sys.exit(main())
