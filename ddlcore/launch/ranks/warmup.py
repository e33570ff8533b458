"""Compile the CPU kernels before the ranks start.

Without this, all ranks would compile the same kernels at the same time.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from ddlcore.contracts.cache import cache_directories, find
from ddlcore.kernels.code import file_name
from ddlcore.launch.ranks.command import own_python

_TIMEOUT_S = 300.0
_PROGRAM = """
from ddlcore.kernels.code import compile_all
compile_all(lambda text: print(text, flush=True), sys.argv[1])
"""


def compile_kernels(report: Callable[[str], None], cache_dir: str) -> None:
    """Compile the CPU kernels if they are not in the cache yet.

    ``report`` is called with each line of text for the user. ``cache_dir`` is the setting of that name. A child process
    compiles the kernels, so that this process does not import numba. A failure is reported but does not end the job: a
    script that never reduces tensors needs no kernels, and a rank that needs kernels reports the failure itself.
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
    except (ImportError, subprocess.TimeoutExpired) as error:  # a broken llvmlite, or a machine that hangs
        report(f"the CPU kernels could not be compiled beforehand: {error}")
        return
    for line in done.stdout.splitlines():
        report(line)
    if done.returncode != 0:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        report(f"the CPU kernels could not be compiled beforehand: {why}")
