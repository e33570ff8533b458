"""The kernels, written as Python functions for numba: they decide which thread moves which bytes, and in which widths.

One launch handles a bucket. Each block finds its chunk of one tensor in the bucket's table, and its threads share the
chunk. Primitives (see primitives.py) handle element types. Addresses and sizes are int64. A ``Machine`` provides the
functions that run a primitive: on the device, or on the host in tests. This module is imported only for compiling.
Kernels do not call Python's built-in functions, because numba would then ask for the present device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numba.cuda

from ddl_nccl.cuda.names import ROW_BYTES, Name
from ddl_nccl.cuda.primitives import (
    GROUPS,
    VECTOR,
    Primitive,
    converter,
    filler,
    groups_of,
    mover,
    reducer,
    shifter,
    unit_of,
    word,
)

Function = Callable[..., Any]
_cuda: Any = numba.cuda  # the simulator replaces this name by its own module


class Machine(Protocol):
    """An object that provides the functions which kernels call. Only ``build`` uses it."""

    def step(self, primitive: Primitive) -> Function:
        """Return a function that kernels can call with the arguments of ``primitive``."""
        ...


def build(name: Name, machine: Machine) -> Function:
    """Return the kernel ``name`` as a function that is not compiled yet.

    ``name.arguments`` are the types of its arguments.
    """
    return {"copy": _copy, "convert": _convert, "reduce": _reduce, "fill": _fill}[name.verb](name, machine)


def _copy(name: Name, machine: Machine) -> Function:
    """Return the kernel that copies between tensors and one contiguous run of bytes. Chunks are counted in bytes."""
    load, byte = machine.step(word()), machine.step(mover(1, 1))
    many, one = machine.step(mover(VECTOR, GROUPS)), machine.step(mover(VECTOR, 1))
    shift_many, shift = machine.step(shifter(GROUPS)), machine.step(shifter(1))

    def copy(chunks, addresses, flat, unpack, scale):  # type: ignore[no-untyped-def]  # numba's
        row = chunks + _cuda.blockIdx.x * ROW_BYTES
        source = load(addresses + load(row) * 8) + load(row + 8)
        nbytes = load(row + 16)
        target = flat + load(row + 24)
        if unpack != 0:
            source, target = target, source
        lane, lanes = _cuda.threadIdx.x, _cuda.blockDim.x
        head = (-target) & (VECTOR - 1)
        head = head if head < nbytes else nbytes
        vectors = (nbytes - head) // VECTOR
        apart = (source + head) & (VECTOR - 1)  # distance from the multiple of 16 below
        to, at = target + head, source + head - apart
        step = lanes * VECTOR
        i = lane
        if apart == 0:
            while i + (GROUPS - 1) * lanes < vectors:
                many(to + i * VECTOR, at + i * VECTOR, step)
                i += GROUPS * lanes
            while i < vectors:
                one(to + i * VECTOR, at + i * VECTOR, step)
                i += lanes
        else:
            while i + (GROUPS - 1) * lanes < vectors:
                shift_many(to + i * VECTOR, at + i * VECTOR, step, apart)
                i += GROUPS * lanes
            while i < vectors:
                shift(to + i * VECTOR, at + i * VECTOR, step, apart)
                i += lanes
        i = lane
        while i < nbytes - vectors * VECTOR:  # the bytes before the first vector and after the last
            j = i if i < head else i + vectors * VECTOR
            byte(target + j, source + j, 1)
            i += lanes

    return copy


def _convert(name: Name, machine: Machine) -> Function:
    """Return the kernel that converts between tensors and one contiguous run of elements of another type, with a scale.

    Chunks are counted in elements.
    """
    s, t = name.dtypes
    size, result = s.itemsize, t.itemsize
    unit, groups, small = unit_of(size, result), groups_of(size, result), min(size, result)
    load = machine.step(word())
    wide, single, one, anywhere = (machine.step(converter(s, t, form)) for form in ("wide", "unit", "one", "any"))

    def convert(chunks, addresses, flat, unpack, scale):  # type: ignore[no-untyped-def]  # numba's
        row = chunks + _cuda.blockIdx.x * ROW_BYTES
        near, start, count, place = load(addresses + load(row) * 8), load(row + 8), load(row + 16), load(row + 24)
        if unpack != 0:
            source, target = flat + place * size, near + start * result
        else:
            source, target = near + start * size, flat + place * result
        lane, lanes = _cuda.threadIdx.x, _cuda.blockDim.x
        aligned = source % size == 0 and target % result == 0
        # The head has as many elements as there are before the address of the smaller type is a multiple of 16. There
        # the address of the other type may be a multiple of 16, too.
        behind = (source if size == small else target) & (VECTOR - 1)
        head = ((VECTOR - behind) & (VECTOR - 1)) // small
        head = head if head < count else count
        units = 0
        if aligned and ((source + head * size) | (target + head * result)) & (VECTOR - 1) == 0:
            units = (count - head) // unit
        to, at = target + head * result, source + head * size
        i = lane
        while i + (groups - 1) * lanes < units:
            wide(to + i * unit * result, at + i * unit * size, scale, lanes * unit * result, lanes * unit * size)
            i += groups * lanes
        while i < units:
            single(to + i * unit * result, at + i * unit * size, scale, 0, 0)
            i += lanes
        i = lane
        while i < count - units * unit:
            j = i if i < head else i + units * unit
            if aligned:
                one(target + j * result, source + j * size, scale, 0, 0)
            else:
                anywhere(target + j * result, source + j * size, scale, 0, 0)
            i += lanes

    return convert


def _reduce(name: Name, machine: Machine) -> Function:
    """Return the kernel that reduces several sources of the same length into one target.

    Each block handles ``share`` elements; ``share`` is an argument of the kernel.
    """
    (dtype,) = name.dtypes
    size = dtype.itemsize
    unit = unit_of(size)
    load = machine.step(word())
    single, one, anywhere = (machine.step(reducer(dtype, name.op, form)) for form in ("unit", "one", "any"))

    def reduce(table, n, target, count, share, prescale, scale):  # type: ignore[no-untyped-def]  # numba's
        first = _cuda.blockIdx.x * share
        mine = share if share < count - first else count - first
        apart, low = 0, target
        for k in range(n):
            address = load(table + 8 * k)
            apart |= address ^ target
            low |= address
        lane, lanes = _cuda.threadIdx.x, _cuda.blockDim.x
        aligned = low % size == 0
        start = target + first * size
        head, units = mine, 0
        if aligned and apart & (VECTOR - 1) == 0:
            head = ((VECTOR - start) & (VECTOR - 1)) // size
            head = head if head < mine else mine
            units = (mine - head) // unit
        i = lane
        while i < units:
            single(target, table, n, (first + head + i * unit) * size, prescale, scale)
            i += lanes
        i = lane
        while i < mine - units * unit:
            j = i if i < head else i + units * unit
            if aligned:
                one(target, table, n, (first + j) * size, prescale, scale)
            else:
                anywhere(target, table, n, (first + j) * size, prescale, scale)
            i += lanes

    return reduce


def _fill(name: Name, machine: Machine) -> Function:
    """Return the kernel that fills memory with one element.

    The kernel's argument ``pattern`` is the element, repeated until it fills 8 bytes. Each block fills ``share`` bytes.
    """
    vector, byte = machine.step(filler(VECTOR)), machine.step(filler(1))

    def fill(target, nbytes, share, pattern):  # type: ignore[no-untyped-def]  # numba's
        first = _cuda.blockIdx.x * share
        mine = share if share < nbytes - first else nbytes - first
        start = target + first  # share is a multiple of 16, so each block begins with a whole pattern
        lane, lanes = _cuda.threadIdx.x, _cuda.blockDim.x
        head = (-start) & (VECTOR - 1)
        head = head if head < mine else mine
        turn = (head & 7) * 8
        turned = pattern if turn == 0 else ((pattern >> turn) & ((1 << (64 - turn)) - 1)) | (pattern << (64 - turn))
        vectors = (mine - head) // VECTOR
        i = lane
        while i < vectors:
            vector(start + head + i * VECTOR, turned)
            i += lanes
        i = lane
        while i < mine - vectors * VECTOR:
            j = i if i < head else i + vectors * VECTOR
            byte(start + j, pattern >> ((j & 7) * 8))
            i += lanes

    return fill
