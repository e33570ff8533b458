"""Times the training of models on this host: with ddl, with the framework's own way, with barriers, and alone.

    python tools/bench_training.py [--framework torch] [--np 1,2,4] [--models wide,deep,gpt,resnet] [--rounds 15]

It starts its own ranks, with one thread each. The contenders train the same model on the same inputs, in alternation. A
ratio is the median over the rounds, with its 95 % interval. If the whole interval of a ratio misses its target, the
exit status is 1 (with --no-check: 0).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds modules in its own folder only

from tools.training.contenders import Measured, measure
from tools.training.frameworks import FRAMEWORKS, Framework
from tools.training.meeting import room
from tools.training.report import (
    Table,
    aligned,
    exposed_table,
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


def _rounds(text: str) -> int:
    if int(text) < LEAST_ROUNDS:
        raise argparse.ArgumentTypeError(f"{LEAST_ROUNDS} rounds at least")
    return int(text)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=_numbers, default=[2], metavar="N,…", help="numbers of ranks, one after the other")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch", help="what trains (torch)")
    parser.add_argument("--models", type=lambda text: text.split(","), metavar="NAME,…", help="which of them (all)")
    parser.add_argument("--rounds", type=_rounds, default=15, metavar="N", help="turns that each contender has")
    parser.add_argument("--no-check", action="store_true", help="exit with 0 whatever is missed")
    parser.add_argument("--timeline", type=Path, metavar="DIR", help="keep ddl's timelines there, and read them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    parser.add_argument("--load", type=Path, nargs="+", metavar="FILE", help="show what --json wrote; measure nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the efficiency there (.svg or .png)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables between the marks of this file")
    asked = parser.parse_args(arguments)
    if asked.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; pip install matplotlib")
    known = FRAMEWORKS[asked.framework].models
    unknown = set(asked.models or ()) - set(known)
    if unknown:
        parser.error(f"argument --models: no model is called {', '.join(unknown)}; there are {', '.join(known)}")
    asked.models = asked.models or list(known)
    return asked


def _version(framework: Framework) -> str:
    """Return the version of the distribution that contains the framework."""
    for name in framework.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def machine(framework: Framework) -> str:
    """Return one line with the processor, the number of usable cores, and the versions of Python, framework and ddl."""
    from ddlcore import __version__
    from ddlcore.launch.ranks.environment import usable_cores

    processor = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    trained = f"{framework.distributions[0]} {_version(framework)}"
    versions = f"Python {platform.python_version()}, {trained}, ddl {__version__}"
    return f"{usable_cores()} cores of {processor}, {versions}"


def printer() -> Callable[[Table], None]:
    """Return a function that prints a table: with rich on a terminal, and as aligned text elsewhere."""
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
    """Yield the measurements of every model on every number of ranks, each in a job of its own."""
    from ddl_doctor.timeline.reading import read_trace
    from ddl_doctor.timeline.summary import summarise

    from ddlcore import run

    if asked.timeline is not None:
        asked.timeline.mkdir(parents=True, exist_ok=True)
    env = {"OMP_NUM_THREADS": "1", **FRAMEWORKS[asked.framework].environment}
    terminal = os.ttyname(2) if sys.stderr.isatty() else ""
    for ranks in asked.np:
        for name in asked.models:
            with room(ranks) as place:
                arguments = (asked.framework, name, asked.rounds, place, terminal)
                if asked.timeline is None:
                    yield run(measure, arguments, num_proc=ranks, env=env)[0]
                    continue
                trace = asked.timeline / f"{asked.framework}-{name}-{ranks}.json"
                times = run(measure, arguments, num_proc=ranks, env={**env, "DDL_TIMELINE": str(trace.absolute())})[0]
                yield replace(times, exposed=summarise(*read_trace(trace)).exposed)


def loaded(paths: Sequence[Path]) -> Iterator[Measured]:
    """Yield the measurements that earlier runs have written."""
    for path in paths:
        for run in json.loads(path.read_text())["runs"]:
            yield Measured(**run)


def shown(runs: Iterable[Measured]) -> list[Measured]:
    """Print each measurement immediately, and return all of them."""
    show = printer()
    kept = []
    for run in runs:
        size = f"{run.tensors} tensors, {run.parameters / 1e6:.2f} million parameters"
        print(f"{run.model}: {run.ranks} ranks, {size}; {len(run.seconds['ddl'])} rounds of {run.steps} steps")
        show(ratio_table(ratio_rows(run)))
        show(speed_table([run]))
        if run.exposed is not None:
            show(exposed_table([run]))
        kept.append(run)
    return kept


def main() -> int:
    """Run the benchmark and return the exit status: 1 if a target is certainly missed."""
    asked = options()
    ready = list(loaded(asked.load)) if asked.load else []
    framework = FRAMEWORKS[ready[0].framework if ready else asked.framework]
    print(machine(framework), flush=True)
    runs = shown(ready or measured(asked))
    if asked.json is not None:
        written = {"machine": machine(framework), "runs": [asdict(run) for run in runs]}
        asked.json.write_text(json.dumps(written, indent=1))
    if asked.plot is not None:
        from tools.training.chart import draw

        draw(runs, asked.plot)
    if asked.markdown is not None:
        sizes = ",".join(dict.fromkeys(str(run.ranks) for run in runs))
        which = "" if framework.name == "torch" else f"--framework {framework.name} "
        command = f"python tools/bench_training.py {which}--np {sizes} --rounds {len(runs[0].seconds['ddl'])}"
        text = asked.markdown.read_text(encoding="utf-8") if asked.markdown.exists() else ""
        tables = section(runs, command, machine(framework))
        asked.markdown.write_text(refreshed(text, tables, framework.marks), encoding="utf-8")
    wrong = missed([row for run in runs for row in ratio_rows(run)])
    return int(wrong and not asked.no_check)


if __name__ == "__main__":
    sys.exit(main())
