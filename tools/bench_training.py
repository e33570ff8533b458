"""Times the training of four models on this host: by ddl, by DDP on Gloo, with a barrier a step, and without any of it.

Run: python tools/bench_training.py [--np 1,2,4] [--models wide,deep,gpt,resnet] [--rounds 15]

It starts its own ranks, with one torch thread each. The four contenders train the same model in the same
processes, in alternation. A ratio is the median over the rounds, with its 95 % interval. Where the whole
interval of a ratio misses its target, the exit status is 1 (--no-check: 0).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, this file sees its own folder only

from tools.training.contenders import Measured, measure
from tools.training.models import WORKLOADS
from tools.training.report import (
    Table,
    aligned,
    missed,
    ratio_rows,
    ratio_table,
    refreshed,
    section,
    speed_table,
)

LEAST_ROUNDS = 2


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError
    return numbers


def _models(text: str) -> list[str]:
    unknown = set(text.split(",")) - set(WORKLOADS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no model is called {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    return text.split(",")


def _rounds(text: str) -> int:
    if int(text) < LEAST_ROUNDS:
        raise argparse.ArgumentTypeError(f"{LEAST_ROUNDS} rounds at least")
    return int(text)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=_numbers, default=[2], metavar="N,…", help="numbers of ranks, one after the other")
    parser.add_argument("--models", type=_models, default=list(WORKLOADS), metavar="NAME,…", help="which of the four")
    parser.add_argument("--rounds", type=_rounds, default=15, metavar="N", help="turns that each contender has")
    parser.add_argument("--no-check", action="store_true", help="exit with 0 whatever is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    parser.add_argument("--load", type=Path, nargs="+", metavar="FILE", help="show what --json wrote; measure nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the efficiency there (.svg or .png)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables between the marks of this file")
    return parser.parse_args(arguments)


def machine() -> str:
    """The processor, how many cores are ours, and the versions that matter, in a line."""
    import torch

    from ddlcore import __version__
    from ddlcore.launch.environment import usable_cores

    processor = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, ddl {__version__}"
    return f"{usable_cores()} cores of {processor}, {versions}"


def printer() -> Callable[[Table], None]:
    """Prints a table: by rich on a terminal, else as aligned text."""
    if not sys.stdout.isatty():
        return lambda table: print(aligned(table) + "\n", flush=True)
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table as RichTable

    colours = {"holds": "green", "misses": "red", "within spread": "yellow"}

    def show(table: Table) -> None:
        shown = RichTable(box=SIMPLE, padding=(0, 1, 0, 0))
        for i, title in enumerate(table[0]):
            shown.add_column(title, justify="left" if i < 2 else "right", no_wrap=True)
        for row in table[1:]:
            shown.add_row(*row[:-1], f"[{colours[row[-1]]}]{row[-1]}[/]" if row[-1] in colours else row[-1])
        Console().print(shown)

    return show


def measured(asked: argparse.Namespace) -> Iterator[Measured]:
    """Every model on every number of ranks, in jobs of their own."""
    from ddlcore import run

    terminal = os.ttyname(2) if sys.stderr.isatty() else ""
    for ranks in asked.np:
        for name in asked.models:
            arguments = (name, asked.rounds, terminal)
            yield run(measure, arguments, num_proc=ranks, env={"OMP_NUM_THREADS": "1"})[0]


def loaded(paths: Sequence[Path]) -> Iterator[Measured]:
    """What earlier runs have written."""
    for path in paths:
        for run in json.loads(path.read_text())["runs"]:
            yield Measured(**run)


def shown(runs: Iterable[Measured]) -> list[Measured]:
    """Prints each as it comes."""
    show = printer()
    kept = []
    for run in runs:
        size = f"{run.tensors} tensors, {run.parameters / 1e6:.2f} million parameters"
        print(f"{run.model}: {run.ranks} ranks, {size}; {len(run.seconds['ddl'])} rounds of {run.steps} steps")
        show(ratio_table(ratio_rows(run)))
        show(speed_table([run]))
        kept.append(run)
    return kept


def main() -> int:
    """The exit status: 1 where a target is missed for certain."""
    asked = options()
    print(machine(), flush=True)
    runs = shown(loaded(asked.load) if asked.load else measured(asked))
    if asked.json is not None:
        asked.json.write_text(json.dumps({"machine": machine(), "runs": [asdict(run) for run in runs]}, indent=1))
    if asked.plot is not None:
        from tools.training.chart import draw

        draw(runs, asked.plot)
    if asked.markdown is not None:
        sizes = ",".join(dict.fromkeys(str(run.ranks) for run in runs))
        command = f"python tools/bench_training.py --np {sizes} --rounds {len(runs[0].seconds['ddl'])}"
        text = asked.markdown.read_text(encoding="utf-8") if asked.markdown.exists() else ""
        asked.markdown.write_text(refreshed(text, section(runs, command, machine())), encoding="utf-8")
    wrong = missed([row for run in runs for row in ratio_rows(run)])
    return int(wrong and not asked.no_check)


if __name__ == "__main__":
    sys.exit(main())
