"""Runs examples/torch_digits.py on two ranks; fails unless they learn and end with the same parameters."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["main", "objection"]

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
LEAST_ACCURACY = 95.0  # percent of the test images
COMMAND = ["ddl", "run", "-np", str(RANKS), "python", "examples/torch_digits.py"]


def objection(output: str, ranks: int = RANKS) -> str:
    """Return what is wrong with the output of a run on ``ranks`` ranks, or ""."""
    accuracy = re.search(r"test accuracy ([\d.]+) %", output)
    digests = re.findall(r"rank \d+ of \d+: parameters (\w+)", output)
    if accuracy is None or float(accuracy[1]) < LEAST_ACCURACY:
        return f"the test accuracy is {accuracy[1] + ' %' if accuracy else 'not printed'}, not {LEAST_ACCURACY:g} % or more"
    if len(digests) != ranks or len(set(digests)) != 1:
        return f"the parameters' digests are {digests}, not {ranks} times the same"
    return ""


def main() -> int:
    """Run the demo and return the exit code: 0, that of the run, or 1 after a line that says what is wrong."""
    print(f"$ {' '.join(COMMAND)}", flush=True)
    begun_s = time.monotonic()
    lines = []
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    wrong = f"ddl run ended with exit code {run.returncode}" if run.returncode else objection("".join(lines))
    print(f"demo: {wrong or 'passed'} ({time.monotonic() - begun_s:.1f} s)")
    return run.returncode or bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
