"""Times what a new user does first, by the commands of README.md: from an empty environment to a trained model."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.release.steps import ROOT, Failed, run

__all__ = ["LIMIT_S", "TARGET_S", "Example", "example", "first_model", "install_command", "verdict"]

TARGET_S = 150.0  # beside another step on two cores (alone: 90); a slow network may exceed it, so it only warns
LIMIT_S = 900.0  # above this, something is wrong with more than the network


@dataclass(frozen=True)
class Example:
    """README's first example: a script, the command that runs it, and what it prints."""

    script: str
    command: str
    printed: tuple[str, ...]

    def check(self, shown: str) -> None:
        """Raise Failed if the ranks did not print what README shows."""
        lines = [line for line in shown.splitlines() if line.startswith("[")]
        if sorted(lines) != sorted(self.printed):
            raise Failed(f"README's example printed {lines}, not {list(self.printed)}")


def example(readme: str) -> Example:
    """Return the first example of ``readme``."""
    block = readme.partition("```python\n")[2].partition("```")[0]
    command, _, shown = block.partition("# $ ")[2].partition("\n")
    return Example(block, command, tuple(line[2:] for line in shown.splitlines()))


def install_command(readme: str) -> list[str]:
    """Return the command by which ``readme`` installs the packages of a clone. Raises Failed if there is none."""
    found = re.search(r"^pip install \. .*$", readme, re.MULTILINE)
    if found is None:
        raise Failed("README has no line that begins with `pip install . `")
    return shlex.split(found[0], comments=True)


def first_model(folder: Path) -> str:
    """Make an environment in ``folder``, install README's packages into it, train README's example, and return the times.

    pip's cache and the cache of compiled kernels are not used. Versions are those of constraints.txt, so that a new
    release of another project does not change the result. Raises Failed if a command fails, or if all of them together
    take more than ``LIMIT_S`` seconds.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = example(readme)
    work = folder.with_name(f"{folder.name}-work")
    work.mkdir(parents=True)
    (work / "train.py").write_text(shown.script, encoding="utf-8")
    pip = {"PIP_NO_CACHE_DIR": "1", "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    begun_s = time.monotonic()
    run([sys.executable, "-m", "venv", folder], ROOT)
    made_s = time.monotonic()
    run(install_command(readme), ROOT, path=folder / "bin", environ=pip, limit_s=LIMIT_S)
    installed_s = time.monotonic()
    caches = {"DDL_CACHE_DIR": str(work / "cache")}
    shown.check(run(shlex.split(shown.command), work, path=folder / "bin", environ=caches, limit_s=LIMIT_S))
    trained_s = time.monotonic()
    return verdict({"venv": made_s - begun_s, "pip install": installed_s - made_s, "training": trained_s - installed_s})


def verdict(parts_s: Mapping[str, float]) -> str:
    """Return the times of all parts and their sum in words, with a warning above the target.

    Raises Failed if the sum is above ``LIMIT_S``.
    """
    total_s = sum(parts_s.values())
    text = f"{total_s:.0f} s ({', '.join(f'{name} {part_s:.0f} s' for name, part_s in parts_s.items())})"
    if total_s > LIMIT_S:
        raise Failed(f"{text}: more than {LIMIT_S:g} s")
    return text + (f"; WARNING: the target is {TARGET_S:g} s" if total_s > TARGET_S else f", target {TARGET_S:g} s")
