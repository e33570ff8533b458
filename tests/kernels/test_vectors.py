"""The loops that reduce are vector code of the machine, not one element at a time."""

from __future__ import annotations

import platform
import re
from typing import Any

import pytest

from ddlcore.types import DType, ReduceOp

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="looks for the instructions of x86-64"
)
PACKED = {
    DType.F32: "addps", DType.F64: "addpd", DType.I32: "paddd", DType.I64: "paddq", DType.U8: "paddb",
    DType.F16: "addps", DType.BF16: "addps",
}  # fmt: skip


@pytest.mark.parametrize("dtype", list(PACKED), ids=lambda dtype: dtype.label)
def test_sums_are_packed(dtype: DType) -> None:
    """Whole vectors are added, 16-bit floats as float32; not a single element by itself."""
    found = re.findall(r"^\s+v?(padd[bwdq]|add[ps][sd])\s", _assembly(dtype), re.MULTILINE)
    assert PACKED[dtype] in found
    assert not {"addss", "addsd"} & set(found)


def _assembly(dtype: DType) -> str:
    import llvmlite.binding as llvm
    from llvmlite import ir

    from ddlcore.contracts.machine_code.compile import target_machine
    from ddlcore.kernels.loops import combine_loop

    module: Any = ir.Module()
    combine_loop(module, dtype, ReduceOp.Sum, 0).linkage = "external"
    text: str = target_machine(llvm).emit_assembly(llvm.parse_assembly(str(module)))
    return text
