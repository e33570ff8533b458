"""Runs what a page shows, in an empty folder, as its reader would."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddlcore.testing import run_world
from tests.docs.blocks import ROOT, Block

__all__ = ["Workshop", "here", "imports", "smaller"]

Runs = Callable[..., subprocess.CompletedProcess[str]]

# The same with less of everything: two ranks, one a host, and one size instead of forty.
SMALLER = (
    (r"(-np|-n|--nproc-per-node|--num-proc)([ =])\d+", r"\g<1>\g<2>2"),
    (r"\bnode(\d+):\d+", r"server\1:1"),
    (r"\bnode(\d+)\b", r"server\1"),
    (r"^ddl bench (?!.*--sizes)", "ddl bench --ops allreduce --sizes 4 "),
    (r"--trials \d+", "--trials 2"),
    (r"/tmp/", "tmp/"),
    (r"--ntasks-per-node=\d+", "--ntasks-per-node=1"),
    (r"s/\$/:\d+/", "s/$/:1/"),
)
FEWER = {"DDL_AUTOTUNE_TRIALS": "2", "DDL_AUTOTUNE_STEPS": "3"}
STEPS = (("ddl tune", "20000"), ("--autotune", "2000"))  # `ddl tune` ends its training; the other goes on to the end
AS_STARTED = "README.md"  # whose script is run by the very command; those of other pages by threads
LIMIT_S = 240.0


def smaller(command: str) -> str:
    """The same with less of everything."""
    for pattern, less in SMALLER:
        command = re.sub(pattern, less, command)
    return command


def here(argv: list[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs it on this host."""
    return subprocess.run(argv, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=timeout_s)


class Workshop:
    """The folder of one page. Examples, tools and plugins are where they are in the repository's root."""

    def __init__(self, page: str, folder: Path) -> None:
        self.folder = folder / "work"
        self.site = folder / "site"
        self.programs = folder / "bin"
        for made in (self.folder, self.site, self.programs, self.folder / "tmp", self.folder / ".venv"):
            made.mkdir()
        for name in ("examples", "tools", "plugins", "docs", "Makefile"):
            (self.folder / name).symlink_to(ROOT / name)
        (self.folder / ".venv/bin").symlink_to(self.programs)
        shutil.copy(ROOT / "tests/docs/train.py", self.folder / "train.py")
        self._program("ddl", "-m ddlcore.launch")
        self._program("horovodrun", "-m horovod.runner.launch")
        self._program("pip", str(ROOT / "tests/docs/pip_here.py"))
        self.names: dict[str, Any] = {"__name__": "__page__"}
        self._page = page

    def _program(self, name: str, arguments: str) -> None:
        path = self.programs / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        path.chmod(0o755)

    def environment(self) -> dict[str, str]:
        path = [self.programs, Path(sys.executable).parent, os.environ.get("PATH", os.defpath)]
        sources = [self.site, ROOT, *sorted(ROOT.glob("plugins/*/src")), os.environ.get("PYTHONPATH", "")]
        told = {"PATH": path, "PYTHONPATH": sources}
        return (
            FEWER
            | {name: os.pathsep.join(map(str, values)) for name, values in told.items()}
            | {
                "PAGE_FOLDER": str((ROOT / self._page).parent),
                "PAGE_SITE": str(self.site),
            }
        )

    def shell(self, command: str, run: Runs = here, exact: bool = False) -> str:
        """What one command of a page prints; ``AssertionError`` where its exit code is not the one that its comment names."""
        asked = command
        if not exact:
            command = smaller(command)
            command = re.sub(r"(--metrics-port) \d+", rf"\1 {_free_port()}", command)
        wanted = re.search(r"exit code (\d)", asked)
        codes = {int(wanted[1])} if wanted else {0, 1} if re.match(r"(\.venv/bin/)?ddl doctor", asked) else {0}
        steps = next((number for word, number in STEPS if word in command), "60")
        env = self.environment() | {"STEPS": steps}
        if " examples/" in command:  # what they train is the same on all ranks, all the way
            env["DDL_VERIFY_EVERY"] = "10"
        done = run(["bash", "-c", f"set -e; {command}"], cwd=self.folder, env=env, timeout_s=LIMIT_S)
        assert done.returncode in codes, f"{command}: {done.returncode}\n{done.stdout[-5000:]}{done.stderr[-5000:]}"
        return done.stdout

    def python(self, block: Block) -> None:
        """A script that says how it is run prints what it says; other code is executed by one rank, in the page's names."""
        _, marker, told = block.code.partition("# $ ")
        if not marker:
            self._execute(block)
            return
        command, _, shown = told.partition("\n")
        ranks = re.fullmatch(r"ddl run -np (\d+) python \w+\.py", command)
        if ranks and block.page != AS_STARTED:
            lines = self._threads(block, int(ranks[1]))
            assert sorted(lines) == sorted(line[2:] for line in shown.splitlines()), f"{block} printed {lines}"
            return
        (self.folder / re.findall(r"\S+\.py\b", command)[-1]).write_text(f"{block.before}\n{block.code}\n{block.after}")
        lines = [line for line in self.shell(command, exact=True).splitlines() if not line.startswith("ddl run: ")]
        wanted = [line[2:] for line in shown.splitlines()]
        if command.startswith("mpirun "):  # which passes a line and its end on apart, and another's between them
            text = "".join(lines)
            assert len(text) == len("".join(wanted)) and all(line in text for line in wanted), (
                f"{block} printed {lines}"
            )
            return
        assert sorted(lines) == sorted(wanted), f"{block}: {command} printed {lines}"

    def _threads(self, block: Block, size: int) -> list[str]:
        """What ranks print that are threads: an import for all, where processes would take seconds for theirs."""
        lines: list[str] = []

        def play(rank: int, job: Any) -> None:
            def note(*what: object, flush: bool = False) -> None:
                lines.append(f"[{rank}] {' '.join(map(str, what))}")

            exec(compile(block.code, str(block), "exec"), {"__name__": "__main__", "print": note})

        run_world(size, play, deadline_s=LIMIT_S)
        return lines

    def _execute(self, block: Block) -> None:
        def play(rank: int, job: Any) -> None:
            for code in (block.before, block.code, block.after):
                exec(compile(code, str(block), "exec"), self.names)

        run_world(1, play, deadline_s=LIMIT_S)


def imports(code: str, where: str) -> None:
    """Compiles code that is not run, and finds what it imports."""
    compile(code, where, "exec")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == [], where


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
