"""The few steps that kernels consist of, as LLVM code over raw addresses: load, convert, combine, store.

Each is emitted by one function here for whatever runs it: NVVM, with pointers to the device's memory,
or the host's processor, for tests. Imported only while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ddl_nccl.cuda import elements as el
from ddl_nccl.cuda.elements import I32, I64, Value
from ddlcore.types import DType, ReduceOp

__all__ = [
    "GROUPS",
    "VECTOR",
    "Primitive",
    "converter",
    "filler",
    "groups_of",
    "mover",
    "reducer",
    "shifter",
    "unit_of",
    "word",
]

VECTOR = 16  # bytes of one access, the widest that the hardware has
GROUPS = 4  # vectors that one thread has under way at once: what hides the latency of memory

Emit = Callable[[Any, int, list[Value]], Value]  # builder, address space, arguments -> result; None for nothing


@dataclass(frozen=True)
class Primitive:
    """A step: ``arguments`` and ``result`` are written q for int64, d for float64, and nothing for none."""

    name: str
    arguments: str
    result: str
    emit: Emit


def unit_of(*sizes: int) -> int:
    """Elements of one step whose every access is of 16 bytes: so many of the smallest type fill one."""
    return VECTOR // min(sizes)


def groups_of(*sizes: int) -> int:
    """How many units one thread has under way at once; fewer where a unit is of several vectors."""
    return max(1, GROUPS * min(sizes) // max(sizes))


def _at(b: Any, space: int, address: Value, kind: Any) -> Value:
    return b.inttoptr(address, kind.as_pointer(space))


def _plus(b: Any, address: Value, nbytes: int) -> Value:
    return b.add(address, ir.Constant(I64, nbytes)) if nbytes else address


def _joined(b: Any, parts: list[Value]) -> Value:
    """Vectors one behind the other, as one; their number is a power of two."""
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        order = ir.Constant(el.vector(I32, n), list(range(n)))
        parts = [b.shuffle_vector(x, y, order) for x, y in zip(parts[::2], parts[1::2])]
    return parts[0]


def _load(b: Any, space: int, address: Value, element: Any, n: int, align: int) -> Value:
    """n elements. At ``align`` 16 they fill whole vectors, each read by one access; else n is 1."""
    if align < VECTOR:
        value = b.load(_at(b, space, address, element), align=align)
        return b.insert_element(ir.Constant(el.vector(element, 1), ir.Undefined), value, ir.Constant(I32, 0))
    # Two words, taken apart as words: NVVM would read a vector of eight or sixteen small elements in pieces.
    pair = el.vector(I64, 2)
    size = _size(element)
    parts = []
    for at in range(0, n * size, VECTOR):
        words = b.load(_at(b, space, _plus(b, address, at), pair), align=VECTOR)
        for half in range(2):
            each = b.extract_element(words, ir.Constant(I32, half))
            parts.append(b.bitcast(each, el.vector(element, 8 // size)))
    return _joined(b, parts)


def _store(b: Any, space: int, address: Value, x: Value, align: int) -> None:
    element, n = x.type.element, x.type.count
    if align < VECTOR:
        b.store(b.extract_element(x, ir.Constant(I32, 0)), _at(b, space, address, element), align=align)
        return
    lanes = 8 // _size(element)
    words = [_packed(b, x, first, lanes) for first in range(0, n, lanes)]
    for i in range(0, len(words), 2):
        pair = ir.Constant(el.vector(I64, 2), ir.Undefined)
        for half in range(2):
            pair = b.insert_element(pair, words[i + half], ir.Constant(I32, half))
        b.store(pair, _at(b, space, _plus(b, address, 8 * i), pair.type), align=VECTOR)


def _packed(b: Any, x: Value, first: int, lanes: int) -> Value:
    """The elements from ``first`` on that fill a word, as one."""
    element = x.type.element
    if _size(element) >= 4:
        order = ir.Constant(el.vector(I32, lanes), list(range(first, first + lanes)))
        return b.bitcast(b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), order), I64)
    halves = []  # by shifts, for the same reason as in _load
    for half in range(2):
        together = ir.Constant(I32, 0)
        for i in range(lanes // 2):
            each = b.extract_element(x, ir.Constant(I32, first + half * lanes // 2 + i))
            together = b.or_(together, b.shl(b.zext(each, I32), ir.Constant(I32, i * element.width)))
        halves.append(b.zext(together, I64))
    return b.or_(halves[0], b.shl(halves[1], ir.Constant(I64, 32)))


def _size(element: Any) -> int:
    return {"float": 4, "double": 8}.get(str(element)) or int(element.width) // 8


def word() -> Primitive:
    """word(address): a word of a table; tables are aligned."""

    def emit(b: Any, space: int, args: list[Value]) -> Value:
        return b.load(_at(b, space, args[0], I64), align=8)

    return Primitive("word", "q", "q", emit)


def mover(width: int, groups: int) -> Primitive:
    """move(target, source, step): ``groups`` times ``width`` bytes, each ``step`` behind the last; aligned to width."""
    kind = el.vector(I64, 2) if width == VECTOR else ir.IntType(8 * width)

    def emit(b: Any, space: int, args: list[Value]) -> None:
        target, source, step = args
        values = []
        for _ in range(groups):  # all loads before any store: they wait for memory together
            values.append(b.load(_at(b, space, source, kind), align=width))
            source = b.add(source, step)
        for value in values:
            b.store(value, _at(b, space, target, kind), align=width)
            target = b.add(target, step)

    return Primitive(f"move{width}_x{groups}", "qqq", "", emit)


def shifter(groups: int) -> Primitive:
    """shift(target, source, step, apart): as ``move`` of 16 bytes, from ``apart`` (1 to 15) bytes behind ``source``.

    Both addresses are multiples of 16: it reads two vectors and joins the end of one to the beginning of the other.
    """
    kind = el.vector(I64, 2)

    def joined(b: Any, words: list[Value], apart: Value) -> Value:
        far = b.icmp_signed(">=", apart, ir.Constant(I64, 8))
        first, middle, last = (b.select(far, words[i + 1], words[i]) for i in range(3))
        bits = b.shl(b.and_(apart, ir.Constant(I64, 7)), ir.Constant(I64, 3))
        back = b.sub(ir.Constant(I64, 63), bits)
        vector = ir.Constant(kind, ir.Undefined)
        for i, (low, high) in enumerate(((first, middle), (middle, last))):
            above = b.shl(b.shl(high, ir.Constant(I64, 1)), back)  # in two steps: nothing remains of it where bits is 0
            vector = b.insert_element(vector, b.or_(b.lshr(low, bits), above), ir.Constant(I32, i))
        return vector

    def emit(b: Any, space: int, args: list[Value]) -> None:
        target, source, step, apart = args
        values = []
        for _ in range(groups):
            pair = [b.load(_at(b, space, _plus(b, source, at), kind), align=VECTOR) for at in (0, VECTOR)]
            values.append([b.extract_element(each, ir.Constant(I32, i)) for each in pair for i in range(2)])
            source = b.add(source, step)
        for words in values:
            b.store(joined(b, words, apart), _at(b, space, target, kind), align=VECTOR)
            target = b.add(target, step)

    return Primitive(f"shift_x{groups}", "qqqq", "", emit)


def filler(width: int) -> Primitive:
    """fill(target, pattern): the low bytes of ``pattern``, or for 16 all of them twice; aligned to width."""

    def emit(b: Any, space: int, args: list[Value]) -> None:
        target, pattern = args
        if width == VECTOR:
            value = el.splat(b, pattern, 2)
            b.store(value, _at(b, space, target, value.type), align=VECTOR)
            return
        kind = ir.IntType(8 * width)
        b.store(b.trunc(pattern, kind) if width < 8 else pattern, _at(b, space, target, kind), align=width)

    return Primitive(f"fill{width}", "qq", "", emit)


def converter(source: DType, target: DType, form: str) -> Primitive:
    """convert(target, source, scale, target_step, source_step): see ``convert`` of elements.

    ``form``: "wide" (``groups_of`` units of aligned vectors, each a step behind the last), "unit" (one of them),
    "one" (an element that is aligned as its size), "any" (an element anywhere).
    """
    groups, n, aligns = _form(form, source.itemsize, target.itemsize)

    def emit(b: Any, space: int, args: list[Value]) -> None:
        to, at, scale, to_step, at_step = args
        values = []
        for _ in range(groups):
            values.append(_load(b, space, at, el.STORED[source], n, aligns[0]))
            at = b.add(at, at_step)
        for value in values:
            _store(b, space, to, el.convert(b, value, source, target, scale), aligns[1])
            to = b.add(to, to_step)

    return Primitive(f"convert_{source.label}_{target.label}_{form}", "qqdqq", "", emit)


def _form(form: str, *sizes: int) -> tuple[int, int, tuple[int, ...]]:
    """How many groups, elements of each, and the alignment of each address."""
    if form in ("wide", "unit"):
        return (groups_of(*sizes) if form == "wide" else 1), unit_of(*sizes), (VECTOR,) * len(sizes)
    return 1, 1, sizes if form == "one" else (1,) * len(sizes)


def reducer(dtype: DType, op: ReduceOp, form: str) -> Primitive:
    """reduce(target, table, n, offset, prescale, scale), as the contract of the kernels says.

    ``table`` holds the n addresses, all of them and ``target`` at least as aligned as ``form`` says;
    ``offset`` is in bytes, of the sources and the target alike. ``form``: "unit", "one" or "any".
    """
    _, n, (align,) = _form(form, dtype.itemsize)
    element = el.STORED[dtype]

    def emit(b: Any, space: int, args: list[Value]) -> None:
        target, table, sources, offset, prescale, scale = args

        def widened(index: Value) -> Value:
            place = b.add(table, b.shl(index, ir.Constant(I64, 3)))
            address = b.add(b.load(_at(b, space, place, I64), align=8), offset)
            return el.widen(b, _load(b, space, address, element, n, align), dtype, prescale)

        first = widened(ir.Constant(I64, 0))
        before = b.block
        head, body, done = (b.append_basic_block(name) for name in ("more", "next", "done"))
        b.branch(head)
        b.position_at_end(head)
        index, left = b.phi(I64), b.phi(first.type)
        b.cbranch(b.icmp_signed("<", index, sources), body, done)
        b.position_at_end(body)
        combined = el.apply(b, op, dtype, left, widened(index))
        after = b.block
        for phi, start, step in (
            (index, ir.Constant(I64, 1), b.add(index, ir.Constant(I64, 1))),
            (left, first, combined),
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(step, after)
        b.branch(head)
        b.position_at_end(done)
        _store(b, space, b.add(target, offset), el.rescale(b, left, dtype, scale), align)

    return Primitive(f"reduce_{dtype.label}_{op.name.lower()}_{form}", "qqqqdd", "", emit)
