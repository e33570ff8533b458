"""Compiles kernels to PTX with numba's CUDA compiler, for which no GPU is needed; the only place that runs it.

What is used of it has been the same in numba's built-in ``numba.cuda`` and in the package numba-cuda:
``compile_ptx``, ``intrinsic`` and the thread's and block's indexes. Device functions are avoided, Python's ``min``
among them: numba compiles each for the present device, and asks for it.
"""

from __future__ import annotations

import re
from typing import Any

from ddl_nccl.cuda.names import Name

__all__ = ["KernelError", "NoCompiler", "compile_image", "compile_ptx"]

GLOBAL = 1  # the address space of device memory
_ENTRY = re.compile(r"\.visible \.entry (\w+)\s*\(")


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
        code, _ = self._cuda.compile_ptx(kernel, signature, cc=capability)
        return str(code)


def compile_ptx(name: Name, capability: tuple[int, int]) -> str:
    """The kernel as text for devices of that compute capability or a later one; its entry is called ``str(name)``.

    Raises NoCompiler, saying what to install, where numba's CUDA compiler cannot run, else KernelError.
    """
    try:
        code = _Nvvm().ptx(name, capability)
    except (ImportError, OSError) as error:  # of what numba, the toolkit or the package numba-cuda do not find
        raise NoCompiler(f"{_cause(error)}; {_cure()}") from error
    except Exception as error:
        if "NotFound" in type(error).__name__:  # of a library, by cuda-pathfinder, which ranks may not have
            raise NoCompiler(f"{_cause(error)}; {_cure()}") from error
        raise KernelError(f"{name} for {capability[0]}.{capability[1]}: {_cause(error)}; {_cure()}") from error
    return _ENTRY.sub(lambda found: f".visible .entry {name}(", code).replace(_entry_of(code), str(name))


def compile_image(name: Name, capability: tuple[int, int]) -> bytes:
    """As ``compile_ptx``, translated for that very device where NVIDIA's linker is there; else the driver will do it.

    A driver refuses PTX of a compiler newer than itself, but loads machine code of the same major version.
    """
    code = compile_ptx(name, capability).encode()
    return _assembled(code, str(name), capability) or code + b"\0"


def _assembled(code: bytes, name: str, capability: tuple[int, int]) -> bytes:
    """Machine code; empty where it cannot be made here."""
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


def _cure() -> str:
    return "install the compiler with `pip install 'ddl-nccl[cu13]'`, or [cu12] where the driver is older than 580"
