"""Runs ddl across hosts that are network namespaces of this machine, each with its own sshd; it needs root.

    python tools/run_test_cluster.py [ranks] --hosts 4 --slots 4       shows on which host each of 16 ranks is
    python tools/run_test_cluster.py demo                              learns the digits on 2 hosts, then measures
    python tools/run_test_cluster.py run -- --backend gloo python X.py ddl run, with -np and -H filled in
    python tools/run_test_cluster.py shell                             a shell on server1; the others by `ssh server2`

Hosts are called server1, server2, …, and are removed when this ends. See docs/test-cluster.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds modules in its own folder only

from ddlcore.launch.ranks.environment import THREAD_VARIABLES
from tools.demo import objection
from tools.test_cluster import TestCluster

ROOT = Path(__file__).resolve().parents[1]
RANKS = "tools/test_cluster/ranks.py"
COLUMNS = ("rank", "host", "local_rank", "local_size", "cross_rank", "cross_size")


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="?", default="ranks", choices=["ranks", "demo", "run", "shell"])
    parser.add_argument("--hosts", type=_positive, default=2, metavar="N", help="[default 2]")
    parser.add_argument("--slots", type=_positive, default=4, metavar="N", help="ranks a host [default 4]")
    parser.add_argument("--rate", type=float, default=1000.0, metavar="MBIT", help="of each host's link [default 1000]")
    parser.add_argument("--rounds", type=_positive, default=9, metavar="N", help="of what demo measures [default 9]")
    parser.add_argument("--no-numbers", action="store_true", help="demo: the digits only")
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours = given.index("--") if "--" in given else len(given)
    asked = parser.parse_args(given[:ours])
    asked.rest = given[ours + 1 :]
    if asked.verb == "run" and not asked.rest:
        parser.error("run what? Say: run -- python train.py")
    return asked


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def ddl_run(cluster: TestCluster, slots: int, rest: Sequence[str]) -> list[str]:
    """Return the command line that runs ranks on all slots of the test cluster."""
    hosts = ",".join(f"{name}:{slots}" for name in cluster.names)
    return ["ddl", "run", "-np", str(slots * len(cluster.names)), "-H", hosts, *rest]


def started(cluster: TestCluster, argv: Sequence[str]) -> Iterator[str]:
    """Print the command, run it, and yield its output line by line.

    Raises CalledProcessError if it does not end with 0.
    """
    print(f"server1$ {' '.join(argv)}", flush=True)
    threads = {name: os.environ.get(name, "1") for name in THREAD_VARIABLES}  # all hosts share this machine's cores
    with cluster.popen("server1", argv, env=threads, cwd=ROOT, stderr=None) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)


@contextlib.contextmanager
def _busy(what: str) -> Iterator[None]:
    """Show on a terminal that something is in progress, until the end of this context."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def ranks(cluster: TestCluster, asked: argparse.Namespace) -> int:
    """Print a table of where every rank is."""
    with _busy("starting the ranks"):
        lines = list(started(cluster, ddl_run(cluster, asked.slots, ["python", RANKS])))
    rows = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
    printer()([list(COLUMNS), *([str(row[name]) for name in COLUMNS] for row in rows)])
    return int(len(rows) != asked.slots * asked.hosts)


def printer() -> Callable[[list[list[str]]], None]:
    """Return a function that prints a table: with rich on a terminal, and as aligned text elsewhere."""
    if not sys.stdout.isatty():
        return _print_aligned
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    def show(rows: list[list[str]]) -> None:
        shown = Table(*[title.replace("_", " ") for title in rows[0]], box=SIMPLE)
        for row in rows[1:]:
            shown.add_row(*row)
        Console().print(shown)

    return show


def _print_aligned(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def digits(cluster: TestCluster, asked: argparse.Namespace) -> int:
    """Learn the digits on all hosts. Return 1 if they are not learnt, or if the ranks' parameters differ."""
    begun_s = time.monotonic()
    lines = []
    rest = ["--log-level", "INFO", "python", "examples/torch_digits.py"]  # this level shows the route
    for line in started(cluster, ddl_run(cluster, asked.slots, rest)):
        print(line, end="", flush=True)
        lines.append(line)
    wrong = objection("".join(lines), asked.slots * asked.hosts)
    print(f"test cluster: {wrong or 'the digits are learnt'} ({time.monotonic() - begun_s:.1f} s)", flush=True)
    return int(bool(wrong))


def numbers(asked: argparse.Namespace) -> int:
    """Measure what the hierarchical transport gains, on separate test clusters."""
    command = [sys.executable, "tools/bench_hierarchical.py"]
    command += ["--rate", f"{asked.rate:g}", "--rounds", str(asked.rounds)]
    print(f"\n$ {' '.join(['python', *command[1:]])}", flush=True)
    return subprocess.run(command, cwd=ROOT).returncode


def shell(cluster: TestCluster) -> int:
    """Run a shell on server1 until the user leaves it."""
    print(f"{', '.join(cluster.names)}; this is server1. Leave it with Ctrl-D.", flush=True)
    prompt = {"PS1": r"\h:\w\$ "}
    with cluster.popen("server1", ["bash", "--norc"], env=prompt, stdin=None, stdout=None, stderr=None) as process:
        return process.wait()


def on_a_cluster(asked: argparse.Namespace) -> int:
    """Run the verb on a test cluster; ``numbers`` brings up its own."""
    with contextlib.ExitStack() as stack:
        with _busy(f"bringing up {asked.hosts} hosts"):
            cluster = stack.enter_context(TestCluster(asked.hosts, rate_mbit=asked.rate))
        if asked.verb == "shell":
            return shell(cluster)
        if asked.verb == "ranks":
            return ranks(cluster, asked)
        if asked.verb == "demo":
            return digits(cluster, asked)
        for line in started(cluster, ddl_run(cluster, asked.slots, asked.rest)):
            print(line, end="", flush=True)
        return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, or 2 if there can be no test cluster."""
    asked = options(arguments)
    try:
        failed = on_a_cluster(asked)
        if asked.verb == "demo" and not asked.no_numbers:
            failed = numbers(asked) or failed
        return failed
    except subprocess.CalledProcessError as error:
        print(f"test cluster: {error.cmd[0]} ended with {error.returncode}", file=sys.stderr)
        return error.returncode if error.returncode > 0 else 1
    except RuntimeError as error:
        print(f"test cluster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
