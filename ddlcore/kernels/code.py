"""Load the machine code of the kernels from the cache, or compile it if the cache does not contain it.

To load the code, a rank imports only llvmlite (50 ms). numba, whose import takes half a second, is imported only to
compile the code.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from ddlcore.contracts.cache import alone, cache_directories, find, keep
from ddlcore.kernels.functions import FUNCTIONS

SOURCES = (
    "../contracts/elements.py",
    "bucket.py",
    "code.py",
    "compile.py",
    "exchange.py",
    "frame.py",
    "functions.py",
    "intrinsics.py",
    "channels.py",
    "loops.py",
    "ring.py",
    "whole.py",
)
COMPILE_S = 120.0  # time to wait for another process that compiles
_COMPILING: Final = threading.Lock()
_LOADING: Final = threading.Lock()
C_TYPES: dict[str, Any] = {"q": ctypes.c_void_p, "d": ctypes.c_double}  # faster than c_int64


class Code:
    """The machine code of the kernels, loaded into this process.

    ``code.function(name)`` returns a C function that Python can call. A call releases the GIL.
    """

    def __init__(self, image: bytes) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True, codemodel="jitdefault")
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)  # owns the code
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(image))
        self._engine.finalize_object()

    def function(self, name: str) -> Callable[..., int]:
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, *(C_TYPES[c] for c in FUNCTIONS[name]))
        return kind(self._engine.get_function_address(name))


def file_name() -> str:
    """Return the name of the cache file. The name depends on the sources, the compilers' versions and the processor."""
    import llvmlite
    import llvmlite.binding as llvm

    # The machine code fits only the processor for which it was compiled, and machines of several kinds may share a home
    # directory. With the wrong file, a rank would die by an illegal instruction. So the digest in the name covers the
    # processor's name and features, the versions of the compilers, and the bytes of all sources on which the code
    # depends. Therefore a file is never outdated: if something changes, another name is looked for. A module that
    # affects the code must be in SOURCES.
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((here / source).read_bytes())
    try:
        numba = version("numba")
    except PackageNotFoundError:
        numba = "?"
    facts = (sys.platform, platform.machine(), llvmlite.__version__, numba)
    digest.update("|".join((*facts, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())).encode())
    return f"kernels-{digest.hexdigest()[:24]}.o"


def obtain(cache_dir: str = "") -> tuple[bytes, str]:
    """Return the machine code and a text. Compile the code if the cache does not contain it.

    The text is "" if the code was in the cache. If the code was compiled, the text says where the code was stored.
    ``cache_dir`` is the cache directory that the user has chosen, or "".
    """
    name = file_name()
    image = find(name, cache_directories(cache_dir))
    if image is not None:
        return image, ""
    with _COMPILING, alone(cache_directories(cache_dir), COMPILE_S):
        image = find(name, cache_directories(cache_dir))
        if image is not None:  # another process has compiled it meanwhile
            return image, ""
        from ddlcore.kernels.compile import compile_object

        image = compile_object()
        place = keep(name, image, cache_directories(cache_dir))
    return image, f"in {place}" if place else "nowhere: no cache directory is writable, set DDL_CACHE_DIR"


def compile_all(report: Callable[[str], None], cache_dir: str = "") -> float:
    """Compile the kernels if the cache does not contain them, and return the time in seconds that this took.

    Return 0 if the cache contains the kernels. ``report`` is called with one line of text if the kernels were compiled.
    The launcher calls this function before it starts the ranks. ``cache_dir`` is the cache directory that the user has
    chosen, or "".
    """
    start = time.perf_counter()
    _, kept = obtain(cache_dir)
    if not kept:
        return 0.0
    seconds = time.perf_counter() - start
    report(f"compiled the CPU kernels in {seconds:.1f} s, once for this machine; kept {kept}")
    return seconds


def load(cache_dir: str = "") -> Code:
    """Load the machine code of the kernels, and return it. For one ``cache_dir``, the same object is always returned.

    If no cache contains the code, compile it, which takes some seconds. Any thread may call this function; a lock makes
    sure that only one thread loads at a time, as LLVM requires. Loaded code is never freed, because function pointers
    into the code remain in use.
    """
    with _LOADING:
        return _load(cache_dir)


@functools.cache
def _load(cache_dir: str) -> Code:
    return Code(obtain(cache_dir)[0])
