"""Compiles kernels to PTX with numba's CUDA compiler, which needs no GPU. Only this file runs that compiler.

This module uses only those parts of numba that are the same in its built-in ``numba.cuda`` and in the package
numba-cuda: ``compile_ptx``, ``intrinsic``, and the indexes of thread and block. Kernels call no device functions, not
even Python's ``min``. numba would compile each such function for the device that is present, and so would need a
device.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from ddl_nccl.cuda.names import Name
from ddlcore.contracts import pip_install

GLOBAL = 1  # the address space of device memory
_ENTRY = re.compile(r"\.visible \.entry (\w+)\s*\(")
_VERSION = re.compile(r"^\.version (\d+)\.(\d+)", re.MULTILINE)
# Compute capability -> the first PTX version that knows it, which every driver for such a device knows. For devices up
# to Hopper it is the PTX version of CUDA 12.0.
_KNOWN_SINCE = {(8, 8): (9, 0), (10, 0): (8, 6), (10, 3): (8, 8), (11, 0): (9, 0), (12, 0): (8, 7), (12, 1): (8, 8)}
_UP_TO_HOPPER = (8, 0)


class NoCompiler(RuntimeError):
    """Raised if there is no compiler. The message says which part is missing and how to install it."""


class KernelError(RuntimeError):
    """Raised if the compiler rejects a kernel, or does not know the device."""


class _Nvvm:
    """The ``Machine`` (see kernels.py) whose functions run on the device."""

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

        # numba reads the number of arguments from the definition, so each primitive needs a function with as many.
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
    """Provide NumPy's ``row_stack`` inside a ``with`` block.

    numba-cuda up to 0.30 uses ``row_stack`` at its first compilation, and NumPy 2.5 no longer has this function.
    """
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
    """Return the kernel as PTX for devices of the compute capability ``capability`` or later.

    The name of the kernel in the PTX is ``str(name)``. Raises NoCompiler, which says what to install, if numba's CUDA
    compiler cannot run, and KernelError if the compilation fails.
    """
    try:
        code = _Nvvm().ptx(name, capability)
    except (ImportError, OSError) as error:  # of something that numba, the toolkit or numba-cuda cannot find
        raise NoCompiler(f"{_cause(error)}; {_fix()}") from error
    except Exception as error:
        if "NotFound" in type(error).__name__:  # raised by cuda-pathfinder, which may not be installed, for a library
            raise NoCompiler(f"{_cause(error)}; {_fix()}") from error
        raise KernelError(f"{name} for {capability[0]}.{capability[1]}: {_cause(error)}; {_fix()}") from error
    code = _VERSION.sub(lambda found: _version(found, capability), code, count=1)
    return _ENTRY.sub(lambda found: f".visible .entry {name}(", code).replace(_entry_of(code), str(name))


def _version(found: re.Match[str], capability: tuple[int, int]) -> str:
    """Return the version line for the PTX, with the lowest version that knows the device.

    The version is never later than the compiler's own. Linkers and drivers refuse PTX of a later version than their
    own, even if the code needs nothing new. ``found`` is the match of the version line that the compiler has written.
    """
    own = (int(found[1]), int(found[2]))
    least = _KNOWN_SINCE.get(capability, _UP_TO_HOPPER if capability <= (9, 0) else own)
    return ".version {}.{}".format(*min(own, least))


def compile_image(name: Name, capability: tuple[int, int]) -> bytes:
    """Return machine code for this device if NVIDIA's linker is installed, otherwise PTX, which the driver translates.

    A driver refuses PTX of a later version than its own, but loads machine code of the same major version of CUDA.
    """
    code = compile_ptx(name, capability).encode()
    return assembled(code, str(name), capability) or code + b"\0"


def assembled(code: bytes, name: str, capability: tuple[int, int]) -> bytes:
    """Return the PTX ``code`` translated to machine code, or empty bytes if it cannot be translated on this machine.

    ``name`` is the kernel's name in the linker's messages.
    """
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
    except Exception:  # no library, or one older than the compiler; the bindings have a class for each
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
    return f"install the compiler: {pip_install('ddl-nccl[cu13]')} (or [cu12] where the driver is older than 580)"
