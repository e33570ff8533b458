"""Compile functions with numba into one object file. No other module runs numba."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ddlcore.contracts.machine_code.code import MachineCode

__all__ = ["compile_object", "target_machine"]

_LETTERS = {"int64": "q", "float64": "d"}


def compile_object(code: MachineCode) -> bytes:
    """Compile the functions of ``code``, and return the content of the object file.

    The functions of other machine code that they call are undefined symbols of the object file. Raises ImportError,
    which names the function, if one is missing, takes other arguments than ``code`` says, or is called but is neither
    in ``code`` nor in what it ``uses``.
    """
    import llvmlite.binding as llvm

    from ddlcore.contracts.machine_code.intrinsics import DECLARED

    rooms: list[Any] = [import_module(name) for name in code.modules]
    module: Any = None
    for name, arguments in code.functions.items():
        # A module may have declared the function of another one by ``outside``.
        found = (getattr(room, name, None) for room in rooms)
        function = next((one for one in found if hasattr(one, "overloads")), None)
        if function is None:
            raise ImportError(f"machine code: no module of {', '.join(code.modules)} has a compiled function {name}")
        (result,) = function.overloads.values()
        have = "".join(_LETTERS[str(one)] for one in result.signature.args)
        if (have, str(result.signature.return_type)) != (arguments, "int64"):
            raise ImportError(f"machine code: {name} is compiled as {result.signature}, and declared as {arguments!r}")
        part = llvm.parse_assembly(result.library.get_llvm_str())
        part.link_in(_exported(llvm, part, name, result.fndesc.llvm_func_name, arguments))
        if module is None:
            module = part
        else:
            module.link_in(part)
    lent = {name for used in code.uses for name in used.functions}
    for function in module.functions:
        if not function.is_declaration and function.name not in code.functions:
            function.linkage = "internal"
        if function.is_declaration and function.name in DECLARED - lent:
            raise ImportError(f"machine code: {function.name} is called; name its MachineCode in `uses`")
    image: bytes = target_machine(llvm).emit_object(module)
    return image


def _exported(llvm: Any, part: Any, name: str, inner: str, arguments: str) -> Any:
    """Return an LLVM module with a C function ``name`` that calls ``inner``, a function compiled by numba.

    ``inner`` has two pointers for results before its arguments, and returns a status. ``arguments`` has a letter for
    the type of each argument, as in MachineCode. ``part`` is the LLVM module that contains ``inner``.
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


def target_machine(llvm: Any) -> Any:
    """Return LLVM's code generator for the processor of this machine. ``llvm`` is the module llvmlite.binding."""
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )
