"""Load machine code from the cache, or compile it if the cache does not contain it.

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
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ddlcore.contracts.cache import alone, cache_directories, find, keep
from ddlcore.contracts.machine_code.code import MachineCode

__all__ = ["LoadedCode", "file_name", "load", "obtain"]

COMPILE_S = 120.0  # time to wait for another process that compiles
_COMPILING: Final = threading.Lock()
_LOADING: Final = threading.Lock()
_COMPILERS = ("code", "compile", "intrinsics")
C_TYPES: dict[str, Any] = {"q": ctypes.c_void_p, "d": ctypes.c_double}  # faster than c_int64


class LoadedCode:
    """Machine code that is loaded into this process. Loaded code is never freed."""

    def __init__(self, image: bytes, functions: Mapping[str, str]) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True, codemodel="jitdefault")
        self._functions = functions
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)  # owns the code
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(image))
        self._engine.finalize_object()

    def function(self, name: str) -> Callable[..., int]:
        """Return the C function ``name``, for calls from Python. A call releases the GIL."""
        address = self.address(name)
        return ctypes.CFUNCTYPE(ctypes.c_int64, *(C_TYPES[c] for c in self._functions[name]))(address)

    def address(self, name: str) -> int:
        """Return the address of the C function ``name``. Raises KeyError if there is none."""
        found: int = self._engine.get_function_address(name) if name in self._functions else 0
        if not found:
            raise KeyError(f"the machine code has no function {name}")
        return found


def file_name(code: MachineCode) -> str:
    """Return the name of the cache file of ``code``.

    The name depends on the sources, the compilers' versions and the processor. Raises ImportError if a module of
    ``code`` does not exist.
    """
    import llvmlite
    import llvmlite.binding as llvm

    # The machine code fits only the processor for which it was compiled, and machines of several kinds may share a home
    # directory. With the wrong file, a rank would die by an illegal instruction. So the digest in the name covers the
    # processor's name and features, the versions of the compilers, and the bytes of all sources on which the code
    # depends. Therefore a file is never outdated: if something changes, another name is looked for.
    try:
        numba = version("numba")
    except PackageNotFoundError:
        numba = "?"
    facts = (sys.platform, platform.machine(), llvmlite.__version__, numba)
    digest = hashlib.sha256(_sources(code))
    digest.update("|".join((*facts, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())).encode())
    return f"kernels-{digest.hexdigest()[:24]}.o"


def _sources(code: MachineCode) -> bytes:
    """Return a digest of all text on which ``code`` depends: also that of the code whose functions it calls."""
    parts = [repr(sorted(code.functions.items())).encode()]
    for name in (*(f"{__package__}.{one}" for one in _COMPILERS), *code.modules, *code.also):
        spec = find_spec(name)
        try:
            parts.append(Path(str(spec and spec.origin)).read_bytes())
        except OSError as error:
            raise ImportError(f"{name}, a source of machine code, cannot be read; install its package again") from error
    parts += [_sources(used) for used in code.uses]
    # Each with its own digest: text that moves from one module to the next must change the result.
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def obtain(code: MachineCode, cache_dir: str = "") -> tuple[bytes, str]:
    """Return the object file of ``code`` and a text. Compile the code if the cache does not contain it.

    The text is "" if the file was in the cache. If the code was compiled, the text says where the file was stored.
    ``cache_dir`` is the cache directory that the user has chosen, or "".
    """
    name = file_name(code)
    image = find(name, cache_directories(cache_dir))
    if image is not None:
        return image, ""
    with _COMPILING, alone(cache_directories(cache_dir), COMPILE_S):
        image = find(name, cache_directories(cache_dir))
        if image is not None:  # another process has compiled it meanwhile
            return image, ""
        from ddlcore.contracts.machine_code.compile import compile_object

        image = compile_object(code)
        place = keep(name, image, cache_directories(cache_dir))
    return image, f"in {place}" if place else "nowhere: no cache directory is writable, set DDL_CACHE_DIR"


def load(code: MachineCode, cache_dir: str = "") -> LoadedCode:
    """Load the machine code of ``code``, and return it. The same arguments always return the same object.

    If no cache contains the code, compile it, which takes some seconds. Any thread may call this function; a lock makes
    sure that only one thread loads at a time, as LLVM requires. Loaded code is never freed, because function pointers
    into the code remain in use.
    """
    with _LOADING:
        return _load(code, cache_dir)


@functools.cache
def _load(code: MachineCode, cache_dir: str) -> LoadedCode:
    used = [(one.functions, _load(one, cache_dir)) for one in code.uses]
    image, _ = obtain(code, cache_dir)
    if used:
        import llvmlite.binding as llvm

        # This must come after obtain(): if obtain() compiles, ``outside`` declares the same names without addresses.
        for functions, loaded in used:
            for name in functions:
                llvm.add_symbol(name, loaded.address(name))
    return LoadedCode(image, code.functions)
