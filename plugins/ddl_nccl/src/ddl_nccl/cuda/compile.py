"""Compiles kernels to PTX with numba's CUDA compiler, for which no GPU is needed; the only place that runs it.

What is used of it has been the same in numba's built-in ``numba.cuda`` and in the package numba-cuda:
``compile_ptx``, ``intrinsic`` and the thread's and block's indexes. Device functions are avoided, Python's ``min``
among them: numba compiles each for the present device, and asks for it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from ddl_nccl.cuda.names import Name

__all__ = ["KernelError", "NoCompiler", "assembled", "compile_image", "compile_ptx"]

GLOBAL = 1  # the address space of device memory
_ENTRY = re.compile(r"\.visible \.entry (\w+)\s*\(")
_VERSION = re.compile(r"^\.version (\d+)\.(\d+)", re.MULTILINE)
# Of PTX: the first that knows the device, and so every driver that does. What older devices take CUDA 12.0 has.
_KNOWN_SINCE = {(8, 8): (9, 0), (10, 0): (8, 6), (10, 3): (8, 8), (11, 0): (9, 0), (12, 0): (8, 7), (12, 1): (8, 8)}
_UP_TO_HOPPER = (8, 0)


class NoCompiler(RuntimeError):
    """There is nothing to compile with; the message says what is missing and how to get it."""


class KernelError(RuntimeError):
    """The compiler is there, but does not take a kernel, or knows nothing of the device."""


class _Nvvm:
    """The machine of ``kernels.build`` that makes functions of the device."""

    def __init__(self) -> None:
        import numba
        from numba import cuda

        if not hasattr(cuda, "compile_ptx"):
            raise ImportError("NUMBA_ENABLE_CUDASIM is set: numba simulates CUDA")
        from numba.cuda.extending import intrinsic

        self._cuda: Any = cuda
        self._intrinsic: Any = intrinsic
        types: Any = numba.types
        self.types = {"q": types.int64, "d": types.float64, "": types.void}
        self._void = types.void

    def step(self, primitive: Any) -> Any:
        signature = self.types[primitive.result](*(self.types[letter] for letter in primitive.arguments))

        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
            result = primitive.emit(builder, GLOBAL, list(args))
            return result if primitive.result else context.get_dummy_value()

        # numba takes the number of arguments from the definition, so there must be one for each.
        names = ", ".join(f"a{i}" for i in range(len(primitive.arguments)))
        room: dict[str, Any] = {"answer": (signature, codegen)}
        exec(f"def {primitive.name}(typing, {names}):\n    return answer", room)
        return self._intrinsic(room[primitive.name])

    def ptx(self, name: Name, capability: tuple[int, int]) -> str:
        from ddl_nccl.cuda.kernels import build

        kernel = build(name, self)
        signature = self._void(*(self.types[letter] for letter in name.arguments))
        with _numpy_before_25():
            code, _ = self._cuda.compile_ptx(kernel, signature, cc=capability)
        return str(code)


@contextlib.contextmanager
def _numpy_before_25() -> Iterator[None]:
    """numpy's ``row_stack``, which numba-cuda (0.30 and before) asks for when it first compiles, and numpy 2.5 has not."""
    import numpy

    module: Any = numpy
    if hasattr(module, "row_stack"):
        yield
        return
    module.row_stack = module.vstack
    try:
        yield
    finally:
        del module.row_stack


def compile_ptx(name: Name, capability: tuple[int, int]) -> str:
    """The kernel as text for devices of that compute capability or a later one; its entry is called ``str(name)``.

    Raises NoCompiler, saying what to install, where numba's CUDA compiler cannot run, else KernelError.
    """
    try:
        code = _Nvvm().ptx(name, capability)
    except (ImportError, OSError) as error:  # of what numba, the toolkit or the package numba-cuda do not find
        raise NoCompiler(f"{_cause(error)}; {_fix()}") from error
    except Exception as error:
        if "NotFound" in type(error).__name__:  # of a library, by cuda-pathfinder, which ranks may not have
            raise NoCompiler(f"{_cause(error)}; {_fix()}") from error
        raise KernelError(f"{name} for {capability[0]}.{capability[1]}: {_cause(error)}; {_fix()}") from error
    code = _VERSION.sub(lambda found: _version(found, capability), code, count=1)
    return _ENTRY.sub(lambda found: f".visible .entry {name}(", code).replace(_entry_of(code), str(name))


def _version(found: re.Match[str], capability: tuple[int, int]) -> str:
    """The compiler writes its own, which older linkers and drivers refuse, whatever the code."""
    own = (int(found[1]), int(found[2]))
    least = _KNOWN_SINCE.get(capability, _UP_TO_HOPPER if capability <= (9, 0) else own)
    return ".version {}.{}".format(*min(own, least))


def compile_image(name: Name, capability: tuple[int, int]) -> bytes:
    """As ``compile_ptx``, translated for that very device where NVIDIA's linker is there; else the driver will do it.

    A driver refuses PTX of a later version than its own, but loads machine code of the same major version.
    """
    code = compile_ptx(name, capability).encode()
    return assembled(code, str(name), capability) or code + b"\0"


def assembled(code: bytes, name: str, capability: tuple[int, int]) -> bytes:
    """PTX as machine code; empty where it cannot be made here."""
    try:
        from cuda.bindings import nvjitlink as linker
    except ImportError:
        return b""
    handle: Any = None
    try:
        handle = linker.create(1, [f"-arch=sm_{capability[0]}{capability[1]}"])
        linker.add_data(handle, linker.InputType.PTX, code, len(code), name)
        linker.complete(handle)
        image = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, image)
        return bytes(image)
    except Exception:  # no library, or one older than the compiler: the bindings have a class for each
        return b""
    finally:
        if handle is not None:
            linker.destroy(handle)


def _entry_of(code: str) -> str:
    found = _ENTRY.findall(code)
    if len(found) != 1:
        raise KernelError(f"the compiler made {len(found)} kernels where one was asked for")
    return str(found[0])


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"


def _fix() -> str:
    return "install the compiler with `pip install 'ddl-nccl[cu13]'`, or [cu12] where the driver is older than 580"
