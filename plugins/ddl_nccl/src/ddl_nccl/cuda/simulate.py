"""Runs kernels without a GPU: numba's simulator runs the kernels, and the host's processor runs their primitives.

Numba's simulator executes Python, so it cannot run primitives, which are LLVM code for the device. Therefore the same
LLVM code is emitted for the host. Addresses are addresses of host memory. Simulation is slow, and only for tests.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ddl_nccl.cuda.buckets import Addresses, Ground, KernelLaunch
from ddl_nccl.cuda.kernels import build
from ddl_nccl.cuda.names import Name
from ddl_nccl.cuda.primitives import Primitive

HOST = 0  # the address space of ordinary memory
THREADS = 4  # number of threads of a block; each is a thread of the host
_RUNNING = threading.Lock()


class _Host:
    """The ``Machine`` (see kernels.py) whose functions run on the host."""

    def step(self, primitive: Primitive) -> Any:
        return _compiled(primitive.name, primitive)


@functools.cache
def _machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), jit=True, codemodel="jitdefault"
    )


_steps: dict[str, Any] = {}


def _compiled(name: str, primitive: Primitive) -> Any:
    if name not in _steps:
        _steps[name] = _compile(primitive)
    return _steps[name]


def _compile(primitive: Primitive) -> Any:
    import llvmlite.binding as llvm
    from llvmlite import ir

    kinds = {"q": ir.IntType(64), "d": ir.DoubleType(), "": ir.VoidType()}
    c: dict[str, Any] = {"q": ctypes.c_int64, "d": ctypes.c_double, "": None}
    module = ir.Module()
    module.triple = llvm.get_default_triple()
    kind = ir.FunctionType(kinds[primitive.result], [kinds[letter] for letter in primitive.arguments])
    function = ir.Function(module, kind, primitive.name)
    b = ir.IRBuilder(function.append_basic_block())
    result = primitive.emit(b, HOST, list(function.args))
    if primitive.result:
        b.ret(result)
    else:
        b.ret_void()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), _machine())
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(c[primitive.result], *(c[letter] for letter in primitive.arguments))(
        engine.get_function_address(primitive.name)
    )
    call.engine = engine  # type: ignore[attr-defined]  # owns the code
    return call


@functools.cache
def _kernel(name: Name) -> Any:
    # Use the simulator's class itself: `cuda.jit` returns it only if NUMBA_ENABLE_CUDASIM was set before the import.
    import numba.cuda.simulator.kernel

    simulator: Any = numba.cuda.simulator.kernel
    return simulator.FakeCUDAKernel(build(name, _Host()), device=False)


def launch(name: Name, blocks: int, arguments: Sequence[int | float], threads: int = THREADS) -> None:
    """Run the kernel ``name``, and return when the kernel has ended.

    Any thread may call this function; the simulator runs only one kernel at a time. ``threads`` is the number of
    threads in each block.
    """
    with _RUNNING:
        _kernel(name)[blocks, threads](*arguments)


class _Launch(KernelLaunch):
    def __init__(self, name: Name, blocks: int, arguments: Sequence[int | float], threads: int) -> None:
        self._name, self._blocks, self._arguments, self._threads = name, blocks, list(arguments), threads

    def set(self, index: int, value: float) -> None:
        self._arguments[index] = value

    def run(self) -> None:
        launch(self._name, self._blocks, self._arguments, self._threads)


class _Words(Addresses):
    def __init__(self, words: array[int]) -> None:
        self._words = words
        self.address = words.buffer_info()[0]

    def fill(self, addresses: Sequence[int]) -> None:
        self._words[:] = array("q", addresses)


class Simulated(Ground):
    """A ``Ground`` (memory and kernel launches) that uses host memory.

    Each launch returns when the kernel has ended.
    """

    multiprocessors = 1

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads  # of a block

    def constant(self, words: array[int]) -> Addresses:
        return _Words(words)

    def addresses(self, n: int) -> Addresses:
        return _Words(array("q", bytes(8 * n)))

    def prepare(self, name: Name, blocks: int, arguments: Sequence[int | float]) -> KernelLaunch:
        return _Launch(name, blocks, arguments, self._threads)

    def can_run(self, name: Name) -> bool:
        return True

    def copier(self, sizes: Sequence[int]) -> Callable[[Sequence[int], Sequence[int]], None]:
        def copy(sources: Sequence[int], targets: Sequence[int]) -> None:
            for source, target, size in zip(sources, targets, sizes):
                ctypes.memmove(target, source, size)

        return copy
