"""Has the CPU kernels compiled before the ranks start: else all of them would compile at once, each for itself."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from ddlcore.contracts.cache import cache_directories, find
from ddlcore.kernels.code import file_name
from ddlcore.launch.command import own_python

__all__ = ["compile_kernels"]

_TIMEOUT_S = 300.0
_PROGRAM = """
from ddlcore.kernels.compile import compile_all
compile_all(lambda text: print(text, flush=True), sys.argv[1])
"""


def compile_kernels(report: Callable[[str], None], cache_dir: str) -> None:
    """Compiles what the cache lacks, with one line to ``report``; quick where it lacks nothing.

    numba stays out of this process. A failure is reported and does not end anything: a script that
    never reduces needs no kernels, and a rank that does says so itself.
    """
    try:
        if find(file_name(), cache_directories(cache_dir)) is not None:
            return
        done = subprocess.run(
            own_python(_PROGRAM, cache_dir),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except (ImportError, subprocess.TimeoutExpired) as error:  # a broken llvmlite, a machine that stands still
        report(f"the CPU kernels could not be compiled beforehand: {error}")
        return
    for line in done.stdout.splitlines():
        report(line)
    if done.returncode != 0:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        report(f"the CPU kernels could not be compiled beforehand: {why}")
