"""Every step of every kernel compiles for a GPU, and the steps for whole vectors access 16 bytes at a time.

The LLVM that numba brings compiles for NVIDIA's GPUs, too, so this needs neither a GPU nor a CUDA toolkit. Whole kernels
need NVIDIA's compiler: see test_compile.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import pytest
from ddl_nccl.cuda import compile_all
from ddl_nccl.cuda.compile import GLOBAL
from ddl_nccl.cuda.kernels import build
from ddl_nccl.cuda.names import OPS, catalogue
from ddl_nccl.cuda.primitives import Primitive
from llvmlite import ir

GPU = "nvptx64-nvidia-cuda"
# With one operation a type: the others differ by one instruction.
KERNELS = [name for name in catalogue() if name.verb != "reduce" or name.op == OPS[name.dtypes[0] % len(OPS)]]

WHOLE = ("move16_x1", "move16_x4", "shift_x1", "shift_x4", "fill16", "_wide", "_unit")  # how their names end


class _Steps:
    """A ``Machine`` (see kernels.py) that records the primitives of a kernel."""

    def __init__(self) -> None:
        self.primitives: list[Primitive] = []

    def step(self, primitive: Primitive) -> Callable[..., Any]:
        self.primitives.append(primitive)
        return lambda *_: None


@functools.cache
def _gpu() -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple(GPU)
    except RuntimeError as error:
        pytest.skip(f"this llvmlite does not compile for NVIDIA's GPUs: {error}")
    return target.create_target_machine(cpu="sm_90", opt=3)


def _ptx(primitive: Primitive) -> str:
    """Return ``primitive`` as PTX. Raises RuntimeError if its LLVM code is wrong."""
    kinds = {"q": ir.IntType(64), "d": ir.DoubleType(), "": ir.VoidType()}
    module = ir.Module()
    module.triple = GPU
    kind = ir.FunctionType(kinds[primitive.result], [kinds[letter] for letter in primitive.arguments])
    function = ir.Function(module, kind, primitive.name)
    b = ir.IRBuilder(function.append_basic_block())
    result = primitive.emit(b, GLOBAL, list(function.args))
    if primitive.result:
        b.ret(result)
    else:
        b.ret_void()
    return str(_gpu().emit_assembly(llvm.parse_assembly(str(module))))


def _report(primitive: Primitive, monkeypatch: pytest.MonkeyPatch) -> compile_all.CompileReport:
    monkeypatch.setattr(compile_all, "compile_ptx", lambda *_: _ptx(primitive))
    return compile_all.examine(KERNELS[0], (9, 0), assemble=False)


@pytest.mark.parametrize("verb", ["copy", "convert", "reduce", "fill"])
def test_steps_of_kernels_access_sixteen_bytes(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step for whole vectors reads and writes them in accesses of 16 bytes, and calls no function.

    Steps for single elements are the same code for vectors of one element.
    """
    machine = _Steps()
    for name in KERNELS:
        if name.verb == verb:
            build(name, machine)
    primitives = {primitive.name: primitive for primitive in machine.primitives if primitive.name.endswith(WHOLE)}
    assert primitives
    for step, primitive in primitives.items():
        report = _report(primitive, monkeypatch)
        assert report.loads > 0 or verb == "fill", (step, report)
        assert report.stores > 0, (step, report)
        assert (report.narrow, report.calls) == (0, 0), (step, report)
