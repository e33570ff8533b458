"""The basic steps of kernels, as LLVM code over raw addresses: load, convert, combine, store.

Each step is emitted by one function, either for NVVM with pointers to device memory, or for the host's processor in
tests. This module is imported only for compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ddl_nccl.cuda.elements import convert, rescale, widen
from ddlcore.contracts.elements import I32, I64, STORED, Value, apply, splat, vector
from ddlcore.types import DType, ReduceOp

VECTOR = 16  # bytes of the widest memory access of the hardware
GROUPS = 4  # vectors that one thread loads at once, to hide the latency of memory

Emit = Callable[[Any, int, list[Value]], Value]  # builder, address space, arguments -> result, or None


@dataclass(frozen=True)
class Primitive:
    """A basic step of a kernel, as LLVM code that ``emit`` makes.

    ``arguments`` and ``result`` give the types, one letter for each: q is int64, d is float64. An empty ``result``
    means that the step returns nothing.
    """

    name: str
    arguments: str
    result: str
    emit: Emit


def unit_of(*sizes: int) -> int:
    """Return the number of elements that one step handles: as many as fill 16 bytes in the smallest of the types.

    ``sizes`` are the sizes of the types in bytes. With this number, no memory access of a step is narrower than 16
    bytes.
    """
    return VECTOR // min(sizes)


def groups_of(*sizes: int) -> int:
    """Return the number of units (see ``unit_of``) that one thread loads at once.

    The number is smaller if a unit has several vectors of 16 bytes. ``sizes`` are the sizes of the types in bytes.
    """
    return max(1, GROUPS * min(sizes) // max(sizes))


def _at(b: Any, space: int, address: Value, kind: Any) -> Value:
    return b.inttoptr(address, kind.as_pointer(space))


def _plus(b: Any, address: Value, nbytes: int) -> Value:
    return b.add(address, ir.Constant(I64, nbytes)) if nbytes else address


def _joined(b: Any, parts: list[Value]) -> Value:
    """Emit code that concatenates the vectors ``parts``, and return the result.

    The number of parts is a power of two.
    """
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        order = ir.Constant(vector(I32, n), list(range(n)))
        parts = [b.shuffle_vector(x, y, order) for x, y in zip(parts[::2], parts[1::2])]
    return parts[0]


def _load(b: Any, space: int, address: Value, element: Any, n: int, align: int) -> Value:
    """Emit code that loads ``n`` elements from ``address``, and return the elements.

    If ``align`` is 16, the elements fill whole vectors of 16 bytes, and each vector is loaded by one access. If
    ``align`` is less than 16, ``n`` is 1.
    """
    if align < VECTOR:
        value = b.load(_at(b, space, address, element), align=align)
        return b.insert_element(ir.Constant(vector(element, 1), ir.Undefined), value, ir.Constant(I32, 0))
    # Load two words and split them: NVVM would load a vector of eight or sixteen small elements in several accesses.
    pair = vector(I64, 2)
    size = _size(element)
    parts = []
    for at in range(0, n * size, VECTOR):
        words = b.load(_at(b, space, _plus(b, address, at), pair), align=VECTOR)
        for half in range(2):
            each = b.extract_element(words, ir.Constant(I32, half))
            parts.append(b.bitcast(each, vector(element, 8 // size)))
    return _joined(b, parts)


def _store(b: Any, space: int, address: Value, x: Value, align: int) -> None:
    element, n = x.type.element, x.type.count
    if align < VECTOR:
        b.store(b.extract_element(x, ir.Constant(I32, 0)), _at(b, space, address, element), align=align)
        return
    lanes = 8 // _size(element)
    words = [_packed(b, x, first, lanes) for first in range(0, n, lanes)]
    for i in range(0, len(words), 2):
        pair = ir.Constant(vector(I64, 2), ir.Undefined)
        for half in range(2):
            pair = b.insert_element(pair, words[i + half], ir.Constant(I32, half))
        b.store(pair, _at(b, space, _plus(b, address, 8 * i), pair.type), align=VECTOR)


def _packed(b: Any, x: Value, first: int, lanes: int) -> Value:
    """Emit code that packs ``lanes`` elements of ``x``, from the element ``first`` on, into a word of 64 bits.

    Returns that word.
    """
    element = x.type.element
    if _size(element) >= 4:
        order = ir.Constant(vector(I32, lanes), list(range(first, first + lanes)))
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
    """Return the primitive ``word(address)``, which loads a word of 8 bytes. ``address`` is a multiple of 8."""

    def emit(b: Any, space: int, args: list[Value]) -> Value:
        return b.load(_at(b, space, args[0], I64), align=8)

    return Primitive("word", "q", "q", emit)


def mover(width: int, groups: int) -> Primitive:
    """Return the primitive ``move(target, source, step)``, which copies ``width`` bytes, ``groups`` times.

    After each copy, both addresses grow by ``step`` bytes. Both addresses are aligned to ``width``.
    """
    kind = vector(I64, 2) if width == VECTOR else ir.IntType(8 * width)

    def emit(b: Any, space: int, args: list[Value]) -> None:
        target, source, step = args
        values = []
        for _ in range(groups):  # all loads are before the first store, so that they wait for memory at the same time
            values.append(b.load(_at(b, space, source, kind), align=width))
            source = b.add(source, step)
        for value in values:
            b.store(value, _at(b, space, target, kind), align=width)
            target = b.add(target, step)

    return Primitive(f"move{width}_x{groups}", "qqq", "", emit)


def shifter(groups: int) -> Primitive:
    """Return the primitive ``shift(target, source, step, apart)``, which copies 16 bytes, ``groups`` times.

    The copied bytes begin ``apart`` (1 to 15) bytes after ``source``. After each copy, both addresses grow by ``step``
    bytes. Both addresses are multiples of 16. So each copy loads two vectors, and joins the end of the first vector to
    the beginning of the second vector.
    """
    kind = vector(I64, 2)

    def joined(b: Any, words: list[Value], apart: Value) -> Value:
        far = b.icmp_signed(">=", apart, ir.Constant(I64, 8))
        first, middle, last = (b.select(far, words[i + 1], words[i]) for i in range(3))
        bits = b.shl(b.and_(apart, ir.Constant(I64, 7)), ir.Constant(I64, 3))
        back = b.sub(ir.Constant(I64, 63), bits)
        both = ir.Constant(kind, ir.Undefined)
        for i, (low, high) in enumerate(((first, middle), (middle, last))):
            above = b.shl(b.shl(high, ir.Constant(I64, 1)), back)  # two shifts, because one by 64 bits is undefined
            both = b.insert_element(both, b.or_(b.lshr(low, bits), above), ir.Constant(I32, i))
        return both

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
    """Return the primitive ``fill(target, pattern)``, which stores the low ``width`` bytes of ``pattern``.

    If ``width`` is 16, it stores all 8 bytes of ``pattern`` twice. ``target`` is aligned to ``width``.
    """

    def emit(b: Any, space: int, args: list[Value]) -> None:
        target, pattern = args
        if width == VECTOR:
            value = splat(b, pattern, 2)
            b.store(value, _at(b, space, target, value.type), align=VECTOR)
            return
        kind = ir.IntType(8 * width)
        b.store(b.trunc(pattern, kind) if width < 8 else pattern, _at(b, space, target, kind), align=width)

    return Primitive(f"fill{width}", "qq", "", emit)


def converter(source: DType, target: DType, form: str) -> Primitive:
    """Return the primitive that converts elements from ``source`` to ``target`` with a scale, as ``elements.convert``.

    The primitive is ``convert(target, source, scale, target_step, source_step)``. ``form`` says which elements it
    handles:

    * "wide": several units of aligned vectors (see ``groups_of``). After each unit, the addresses grow by the two
      steps.
    * "unit": one such unit.
    * "one": one element that is aligned to its size.
    * "any": one element at any address.
    """
    groups, n, aligns = _form(form, source.itemsize, target.itemsize)

    def emit(b: Any, space: int, args: list[Value]) -> None:
        to, at, scale, to_step, at_step = args
        values = []
        for _ in range(groups):
            values.append(_load(b, space, at, STORED[source], n, aligns[0]))
            at = b.add(at, at_step)
        for value in values:
            _store(b, space, to, convert(b, value, source, target, scale), aligns[1])
            to = b.add(to, to_step)

    return Primitive(f"convert_{source.label}_{target.label}_{form}", "qqdqq", "", emit)


def _form(form: str, *sizes: int) -> tuple[int, int, tuple[int, ...]]:
    """Return three things: the number of units of a primitive, the elements in each unit, and each address's alignment.

    ``form`` is the form of the primitive (see ``converter``), and ``sizes`` are the sizes in bytes of the types at the
    addresses.
    """
    if form in ("wide", "unit"):
        return (groups_of(*sizes) if form == "wide" else 1), unit_of(*sizes), (VECTOR,) * len(sizes)
    return 1, 1, sizes if form == "one" else (1,) * len(sizes)


def reducer(dtype: DType, op: ReduceOp, form: str) -> Primitive:
    """Return the primitive ``reduce(target, table, n, offset, prescale, scale)``, which reduces ``n`` sources.

    The kernel contract (ddlcore/contracts/kernels.py) defines the result. ``table`` contains the addresses of the
    sources. The sources and ``target`` are at least as aligned as ``form`` says. ``offset`` is a number of bytes that
    is added to the addresses of the sources and of the target. ``form`` is "unit", "one" or "any" (see ``converter``).
    """
    _, n, (align,) = _form(form, dtype.itemsize)
    element = STORED[dtype]

    def emit(b: Any, space: int, args: list[Value]) -> None:
        target, table, sources, offset, prescale, scale = args

        def widened(index: Value) -> Value:
            place = b.add(table, b.shl(index, ir.Constant(I64, 3)))
            address = b.add(b.load(_at(b, space, place, I64), align=8), offset)
            return widen(b, _load(b, space, address, element, n, align), dtype, prescale)

        first = widened(ir.Constant(I64, 0))
        before = b.block
        head, body, done = (b.append_basic_block(name) for name in ("more", "next", "done"))
        b.branch(head)
        b.position_at_end(head)
        index, left = b.phi(I64), b.phi(first.type)
        b.cbranch(b.icmp_signed("<", index, sources), body, done)
        b.position_at_end(body)
        combined = apply(b, op, dtype, left, widened(index))
        after = b.block
        for phi, start, step in (
            (index, ir.Constant(I64, 1), b.add(index, ir.Constant(I64, 1))),
            (left, first, combined),
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(step, after)
        b.branch(head)
        b.position_at_end(done)
        _store(b, space, b.add(target, offset), rescale(b, left, dtype, scale), align)

    return Primitive(f"reduce_{dtype.label}_{op.name.lower()}_{form}", "qqqqdd", "", emit)
