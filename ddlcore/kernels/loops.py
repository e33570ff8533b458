"""Generate the innermost loops over elements as LLVM vector code, one loop for each combination of element types.

Plain loops for numba are not used, for three reasons. Source and target may be the same memory; in this case LLVM does
not vectorise a plain loop. numba has no bfloat16. And numba needs half a minute to compile a hundred small functions,
while these loops compile in two seconds.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ddlcore.contracts.elements import (
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    SHORT_FLOATS,
    STORED,
    Elements,
    Value,
    apply,
    splat,
    vector,
)  # fmt: skip
from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.contracts.machine_code.intrinsics import cgutils, compiled, inline, types
from ddlcore.types import DType, ReduceOp

WIDTH = 32  # elements per iteration: a multiple of every machine's vector length, enough to hide latency
# If the machine does not convert float16 itself, LLVM would call a function that no library here contains.
ELEMENTS = Elements(platform.machine() not in ("x86_64", "AMD64") or bool(llvm.get_host_cpu_features().get("f16c")))
WIDE_LEFT, WIDE_OUT = 1, 2  # bits of ``form`` for 16-bit floats: the left operand is float32, the result is float32

OPS = (ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product)
LOOP = ir.FunctionType(ir.VoidType(), [I64] * 4 + [F64] * 3)  # left, right, out, count, left and right scale, scale

Body = Callable[[Any, list[Value], list[Value]], Value]  # builder, operands, the three scales -> result


def _vector(element: Any) -> Any:
    return vector(element, WIDTH)


def define_loop(module: Any, name: str, operands: list[Any], out: Any, scale: Any, body: Body) -> Any:
    """Define and return a function of type LOOP in ``module``.

    The function applies ``body`` to WIDTH elements at a time. If fewer elements remain at the end, the function copies
    them to a full vector on the stack, and applies ``body`` there. ``operands`` and ``out`` are the types of the
    elements, and ``scale`` is the type of the scales.
    """
    function = ir.Function(module, LOOP, name)
    function.linkage = "linkonce_odr"  # several modules define it; the linker keeps one of the definitions
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    left, right, target, count, *doubles = function.args
    sources = [left, right][: len(operands)]
    scales = [splat(b, b.fptrunc(d, F32) if scale is F32 else d, WIDTH) for d in doubles]
    padded = [b.alloca(_vector(element)) for element in [*operands, out]]

    def turn(froms: list[Value], to: Value) -> None:
        values = [
            b.load(b.inttoptr(address, _vector(element).as_pointer()), align=1)
            for address, element in zip(froms, operands)
        ]
        b.store(body(b, values, scales), b.inttoptr(to, _vector(out).as_pointer()), align=1)

    def moved(address: Value, element: Any, by: Value) -> Value:
        return b.add(address, b.mul(by, ir.Constant(I64, _bytes(element))))

    def copy(to: Value, source: Value, element: Any, length: Value) -> None:
        cgutils.raw_memcpy(
            b, b.inttoptr(to, I8.as_pointer()), b.inttoptr(source, I8.as_pointer()), length, _bytes(element), 1
        )

    with cgutils.for_range(b, b.lshr(count, ir.Constant(I64, WIDTH.bit_length() - 1))) as loop:
        at = b.mul(loop.index, ir.Constant(I64, WIDTH))
        turn([moved(a, e, at) for a, e in zip(sources, operands)], moved(target, out, at))
    whole = b.and_(count, ir.Constant(I64, ~(WIDTH - 1)))
    rest = b.sub(count, whole)
    with b.if_then(b.icmp_signed(">", rest, ir.Constant(I64, 0))):
        for place, element in zip(padded, operands):
            b.store(ir.Constant(_vector(element), None), place)  # zeros: elements after the rest are computed too
        places = [b.ptrtoint(place, I64) for place in padded]
        for address, element, place in zip(sources, operands, places):
            copy(place, moved(address, element, whole), element, rest)
        turn(places[:-1], places[-1])
        copy(moved(target, out, whole), places[-1], out, rest)
    b.ret_void()
    return function


def _bytes(element: Any) -> int:
    return {I8: 1, I16: 2, I32: 4, I64: 8, F32: 4, F64: 8}[element]


# --- which loops there are


def combine_loop(module: Any, dtype: DType, op: ReduceOp, form: int) -> Any:
    """Define and return the loop of ``ddl_combine`` for one type and operation, a function of type LOOP.

    ``form`` consists of the bits WIDE_LEFT and WIDE_OUT. If ``dtype`` is a type of 16-bit floats, these bits say which
    memory contains float32 elements instead.
    """
    short = dtype in SHORT_FLOATS
    left = F32 if form & WIDE_LEFT else STORED[dtype]
    out = F32 if form & WIDE_OUT else STORED[dtype]

    def body(b: Any, values: list[Value], scales: list[Value]) -> Value:
        if not dtype.is_float:
            return apply(b, op, dtype, *values)
        x, y = values
        if short:
            x = x if form & WIDE_LEFT else ELEMENTS.to_float(b, x, dtype)
            y = ELEMENTS.to_float(b, y, dtype)
        result = b.fmul(apply(b, op, dtype, b.fmul(x, scales[0]), b.fmul(y, scales[1])), scales[2])
        return ELEMENTS.from_float(b, result, dtype) if short and not form & WIDE_OUT else result

    name = f"ddl_combine_{dtype.label}_{op.name}_{form}"
    return define_loop(module, name, [left, STORED[dtype]], out, F64 if dtype is DType.F64 else F32, body)


def _convert_loop(module: Any, source: DType, target: DType) -> Any:
    def body(b: Any, values: list[Value], scales: list[Value]) -> Value:
        (x,) = values
        if DType.F64 in (source, target):
            return ELEMENTS.from_double(b, b.fmul(ELEMENTS.to_double(b, x, source), scales[2]), target)
        if DType.F32 in (source, target):
            return ELEMENTS.from_float(b, b.fmul(ELEMENTS.to_float(b, x, source), scales[2]), target)
        return ELEMENTS.from_long(b, ELEMENTS.to_long(b, x, source), target)

    scale = F64 if DType.F64 in (source, target) else F32
    name = f"ddl_convert_{source.label}_{target.label}"
    return define_loop(module, name, [STORED[source]], STORED[target], scale, body)


def _conversions() -> Iterable[tuple[DType, DType]]:
    """Yield the pairs (source type, target type) for which one loop converts directly.

    For all other pairs, two loops are used: one to float64, float32 or int64, and one from that type.
    """
    for dtype in DType:
        yield dtype, DType.F64
        if dtype is not DType.F64:
            yield DType.F64, dtype
        if dtype in SHORT_FLOATS or dtype is DType.F32:
            yield dtype, DType.F32
        if dtype in SHORT_FLOATS:
            yield DType.F32, dtype
        if not dtype.is_float and dtype is not DType.I64:
            yield dtype, DType.I64
            yield DType.I64, dtype


def _dispatch(b: Any, code: Value, loops: dict[int, Any], args: list[Value]) -> None:
    """Generate code that calls the loop ``loops[code]`` with ``args``, or does nothing if there is no such loop.

    ``code`` is a value that is known only when the generated code runs.
    """
    done = b.append_basic_block("done")
    switch = b.switch(code, done)
    for number, function in loops.items():
        block = b.append_basic_block(f"loop{number}")
        switch.add_case(ir.Constant(I64, number), block)
        with b.goto_block(block):
            b.call(function, args)
            b.branch(done)
    b.position_at_end(done)


# Each intrinsic is used in one function only, because a module can define a loop only once.


@inline
def _combine(
    typing: Any, dtype: Any, op: Any, form: Any, left: Any, right: Any, out: Any, count: Any, p: Any, q: Any, r: Any
) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: list[Value]) -> Value:
        loops = {}
        for kind in DType:
            for operation in OPS:
                for shape in range(4 if kind in SHORT_FLOATS else 1):
                    number = kind * 32 + operation * 4 + shape
                    loops[number] = combine_loop(b.module, kind, operation, shape)
        code = b.add(b.add(b.mul(args[0], ir.Constant(I64, 32)), b.mul(args[1], ir.Constant(I64, 4))), args[2])
        _dispatch(b, code, loops, list(args[3:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, *[types.float64] * 3), codegen


@inline
def _convert(typing: Any, source: Any, s: Any, target: Any, t: Any, count: Any, scale: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: list[Value]) -> Value:
        loops = {x * 16 + y: _convert_loop(b.module, x, y) for x, y in _conversions()}
        one = ir.Constant(F64, 1.0)
        address, s, to, t, n, factor = args
        code = b.add(b.mul(s, ir.Constant(I64, 16)), t)
        _dispatch(b, code, loops, [address, address, to, n, one, one, factor])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float64), codegen


@compiled(CPU.functions["ddl_combine"])
def ddl_combine(
    dtype: int,
    op: int,
    form: int,
    left: int,
    right: int,
    out: int,
    count: int,
    left_scale: float,
    right_scale: float,
    scale: float,
) -> int:
    """Compute out[i] = scale * (left_scale * left[i] op right_scale * right[i]) for ``count`` elements. Return 0.

    Integers are not scaled. 16-bit floats are computed in float32 and rounded once; the bits WIDE_LEFT and WIDE_OUT of
    ``form`` say whether ``left`` and ``out`` contain float32 elements. ``out`` may be equal to ``left`` or ``right``;
    otherwise it must not overlap with them.
    """
    _combine(dtype, op, form, left, right, out, count, left_scale, right_scale, scale)
    return 0


@compiled(CPU.functions["ddl_cast"])
def ddl_cast(source: int, s: int, target: int, t: int, count: int, scale: float) -> int:
    """Compute target[i] (of type ``t``) = scale * source[i] (of type ``s``) for ``count`` elements. Return 0.

    The pair of types must be one of ``_conversions``. If both types are integers, the elements are not scaled.
    """
    _convert(source, s, target, t, count, scale)
    return 0
