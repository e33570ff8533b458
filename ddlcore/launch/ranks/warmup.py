"""Compile machine code before the ranks start.

Without this, the first rank of each host would compile it, while the others wait for that rank.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from ddlcore.contracts.cache import cache_directories, find
from ddlcore.contracts.machine_code.code import MachineCode
from ddlcore.contracts.machine_code.loading import file_name, obtain
from ddlcore.launch.ranks.command import own_python
from ddlcore.plug.registry import Registry

_TIMEOUT_S = 300.0
_CPU = "ddlcore.contracts.machine_code.cpu:CPU"
_PROGRAM = """
from ddlcore.launch.ranks.warmup import compile_all
compile_all(sys.argv[2:], lambda text: print(text, flush=True), sys.argv[1])
"""


def machine_code_of(registry: Registry) -> tuple[str, ...]:
    """Return the names of all machine code that ranks may need: that of the CPU kernels, and that of plugins.

    Whether a plugin can be used is not asked, because the ranks may run on another host; its platform is the same.
    """
    found = {one.machine_code for _, one in registry.offers() if sys.platform in (one.platforms or (sys.platform,))}
    return (_CPU, *sorted(found - {""}))


def compile_kernels(codes: Sequence[str], report: Callable[[str], None], cache_dir: str) -> None:
    """Compile those of ``codes`` that are not in the cache yet; each is "module:name" of a MachineCode.

    ``report`` is called with each line of text for the user. ``cache_dir`` is the setting of that name. A child process
    compiles, so that this process does not import numba. A failure is reported but does not end the job: a script that
    never reduces tensors needs no kernels, and a rank that needs kernels reports the failure itself.
    """
    todo = [name for name in codes if not _is_in_cache(name, report, cache_dir)]
    if not todo:
        return
    try:
        done = subprocess.run(
            own_python(_PROGRAM, cache_dir, *todo),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:  # a machine that hangs
        _failed(" ".join(todo), error, report)
        return
    for line in done.stdout.splitlines():
        report(line)
    if done.returncode != 0:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        _failed(" ".join(todo), why, report)


def _is_in_cache(name: str, report: Callable[[str], None], cache_dir: str) -> bool:
    """Return whether the cache has the code ``name``. If that cannot be found out, report why, and return True."""
    try:
        return find(file_name(MachineCode.named(name)), cache_directories(cache_dir)) is not None
    except Exception as error:  # a module of a plugin may raise anything, and llvmlite may be broken
        _failed(name, error, report)
        return True


def _failed(name: str, why: object, report: Callable[[str], None]) -> None:
    report(f"the CPU kernels of {name} could not be compiled beforehand: {why}")


def compile_all(names: Iterable[str], report: Callable[[str], None], cache_dir: str = "") -> float:
    """Compile those of ``names`` that the cache does not contain, and return the time in seconds that this took.

    Each name is "module:name" of a MachineCode. ``report`` is called with one line of text for all that was compiled,
    and with one for each that could not be compiled. Return 0 if nothing was compiled. ``cache_dir`` is the cache
    directory that the user has chosen, or "".
    """
    start = time.perf_counter()
    kept = ""
    for name in names:
        try:
            kept = obtain(MachineCode.named(name), cache_dir)[1] or kept
        except Exception as error:  # what a plugin brings may raise anything
            _failed(name, f"{type(error).__name__}: {error}", report)
    if not kept:
        return 0.0
    seconds = time.perf_counter() - start
    report(f"compiled the CPU kernels in {seconds:.1f} s, once for this machine; kept {kept}")
    return seconds
