"""Compile the kernels with numba into one object file. No other module runs numba."""

from __future__ import annotations

import sys
from typing import Any

from ddlcore.kernels.functions import FUNCTIONS


def compile_object() -> bytes:
    """Compile all functions in FUNCTIONS, and return the content of the object file."""
    import llvmlite.binding as llvm

    from ddlcore.kernels import bucket, loops, whole

    rooms: list[Any] = [loops, bucket, whole]
    if sys.platform == "linux":
        from ddlcore.kernels import channels, exchange, ring

        rooms += [channels, exchange, ring]
    module: Any = None
    for name, arguments in FUNCTIONS.items():
        function = next(getattr(room, name) for room in rooms if hasattr(room, name))
        (result,) = function.overloads.values()
        part = llvm.parse_assembly(result.library.get_llvm_str())
        part.link_in(_exported(llvm, part, name, result.fndesc.llvm_func_name, arguments))
        if module is None:
            module = part
        else:
            module.link_in(part)
    return _emit(llvm, module)


def _exported(llvm: Any, part: Any, name: str, inner: str, arguments: str) -> Any:
    """Return an LLVM module with a C function ``name`` that calls ``inner``, a function compiled by numba.

    ``inner`` has two pointers for results before its arguments, and returns a status. ``arguments`` has a letter for
    the type of each argument, as in FUNCTIONS. ``part`` is the LLVM module that contains ``inner``.
    """
    from llvmlite import ir

    word = ir.IntType(64)
    kinds = [word if c == "q" else ir.DoubleType() for c in arguments]
    outer = ir.Module()
    outer.triple, outer.data_layout = part.triple, part.data_layout
    pointer = word.as_pointer()
    wrapped = ir.Function(outer, ir.FunctionType(ir.IntType(32), [pointer, pointer.as_pointer(), *kinds]), inner)
    function = ir.Function(outer, ir.FunctionType(word, kinds), name)
    b = ir.IRBuilder(function.append_basic_block())
    value, error = b.alloca(word), b.alloca(pointer)
    b.call(wrapped, [value, error, *function.args])  # the status is ignored, because none of our functions raises
    b.ret(b.load(value))
    return llvm.parse_assembly(str(outer))


def _emit(llvm: Any, module: Any) -> bytes:
    for function in module.functions:
        if not function.is_declaration and function.name not in FUNCTIONS:
            function.linkage = "internal"
    image: bytes = target_machine(llvm).emit_object(module)
    return image


def target_machine(llvm: Any) -> Any:
    """Return LLVM's code generator for the processor of this machine. ``llvm`` is the module llvmlite.binding."""
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )
