"""Checks the kernels against float64: all of them at all alignments on a GPU, or some in numba's simulator."""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from ddl_nccl.cuda.buckets import CudaKernels
from ddl_nccl.cuda.runtime import CudaDevice

from ddlcore.contracts.transport import Memory
from ddlcore.types import Device, DType, ReduceOp
from tools.gpu.rows import Row, check, tell

__all__ = ["check_kernels", "main"]

Array = Any  # of numpy; bfloat16 as its bits
OPS = (ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product)
COUNT = 3 * 4096 + 77  # several chunks
WAIT_S = 60.0
FAR_BYTES = 24 << 30  # free memory for buckets of more than 4 GiB, and for earlier memory that is not freed yet


class Ground:
    """Where kernels run: ``memory(nbytes)`` returns memory with an address, ``put`` and ``get`` copy to and from it."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        if on_gpu:
            self.device = CudaDevice()
            self.device.open(Device("cuda", 0))
            self.queue = self.device.queue()
            self.kernels = self.queue.kernels
            self.name = self.device.facts.name
            return
        from ddl_nccl.cuda.simulate import Simulated

        sys.setswitchinterval(5e-5)  # numba's simulator polls
        self.kernels = CudaKernels(Simulated(threads=2))
        self.name = "numba's simulator"

    def memory(self, nbytes: int) -> Memory:
        return self.device.allocate(nbytes) if self.on_gpu else Memory(nbytes)

    def _copy(self, source: int, target: int, nbytes: int) -> None:
        if self.on_gpu:
            self.queue.copy(source, target, nbytes)
        else:
            ctypes.memmove(target, source, nbytes)

    def put(self, array: Array, address: int) -> None:
        pinned = self.device.pinned(array.nbytes) if self.on_gpu else Memory(array.nbytes)
        ctypes.memmove(pinned.address, array.ctypes.data, array.nbytes)
        self._copy(pinned.address, address, array.nbytes)

    def get(self, address: int, like: Array) -> Array:
        pinned = self.device.pinned(like.nbytes) if self.on_gpu else Memory(like.nbytes)
        self._copy(address, pinned.address, like.nbytes)
        if self.on_gpu and not self.queue.record().wait(WAIT_S):
            raise TimeoutError(f"the GPU has not finished within {WAIT_S:.0f} s")
        out = np.empty_like(like)
        ctypes.memmove(out.ctypes.data, pinned.address, like.nbytes)
        return out


# --- types as numpy has them, bfloat16 by its bits


def _stored(dtype: DType) -> Any:
    return np.uint16 if dtype is DType.BF16 else np.dtype(dtype.label)


def _values(x: Array, dtype: DType) -> Array:
    if dtype is DType.BF16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def _rounded(x: Array, dtype: DType) -> Array:
    """Convert float64 to ``dtype``."""
    if dtype is DType.BF16:
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if dtype is DType.BOOL:
        return x != 0
    return x.astype(_stored(dtype)) if dtype.is_float else np.trunc(x).astype(np.int64).astype(_stored(dtype))


def _numbers(dtype: DType, count: int, seed: int) -> Array:
    random = np.random.default_rng(seed)
    if dtype is DType.BOOL:
        return random.integers(0, 2, count).astype(bool)
    if not dtype.is_float:
        return random.integers(0 if dtype in (DType.U8, DType.U16) else -5, 6, count).astype(_stored(dtype))
    return _rounded(random.normal(0, 4, count), dtype)


def _step(dtype: DType) -> float:
    """Return the tolerance of a type: a small multiple of the distance between neighbours near 1; 0 for integers."""
    return {DType.F16: 2.0**-9, DType.BF16: 2.0**-6, DType.F32: 2.0**-20, DType.F64: 2.0**-48}.get(dtype, 0.0)


def _compare(what: str, actual: Array, expected: Array, dtype: DType) -> None:
    step = _step(dtype)
    off = np.abs(_values(actual, dtype) - _values(expected, dtype))
    bad = off > step * np.abs(_values(expected, dtype)) + 8 * step
    if bad.any():
        first = int(np.argmax(bad))
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.size} values are wrong, the first at {first}: "
            f"{_values(actual, dtype)[first]} for {_values(expected, dtype)[first]}"
        )


# --- the checks


def _pack(ground: Ground, dtype: DType, wire: DType, shifts: tuple[int, int], count: int, scale: float) -> None:
    """Check packing two tensors and an empty one, and unpacking them, at these alignments."""
    counts = (count, 0, count // 3 + 1)
    near = [_numbers(dtype, n, i) for i, n in enumerate(counts)]
    places = [ground.memory(x.nbytes + 32) for x in near]
    flat = ground.memory(sum(counts) * wire.itemsize + 32)
    for x, place in zip(near, places):
        ground.put(x, place.address + shifts[0])
    addresses = [place.address + shifts[0] for place in places]
    ground.kernels.pack(addresses, counts, dtype, flat.address + shifts[1], wire, scale)
    what = f"{dtype.label} as {wire.label} times {scale:g} at alignments {shifts[0]} and {shifts[1]}"
    whole = _values(np.concatenate(near), dtype) * scale
    expected = _rounded(whole, wire)
    packed = ground.get(flat.address + shifts[1], expected)
    _compare(f"pack {what}", packed, expected, wire)
    for place, x in zip(places, near):
        ground.put(np.zeros_like(x), place.address + shifts[0])
    ground.kernels.unpack(flat.address + shifts[1], wire, addresses, counts, dtype, 1.0)
    back = np.concatenate([ground.get(a, x) for a, x in zip(addresses, near)])
    _compare(f"unpack {what}", back, _rounded(_values(packed, wire), dtype), dtype)


def _reduce(ground: Ground, dtype: DType, op: ReduceOp, shifts: tuple[int, int], count: int) -> None:
    sources = [_numbers(dtype, count, i) for i in range(3)]
    places = [ground.memory(count * dtype.itemsize + 32) for _ in range(4)]
    for x, place, shift in zip(sources, places, (shifts[0], shifts[1], shifts[0])):
        ground.put(x, place.address + shift)
    addresses = [place.address + shift for place, shift in zip(places, (shifts[0], shifts[1], shifts[0]))]
    target = places[3].address + shifts[0]
    ground.kernels.fill_identity(target, count, dtype, op)
    ground.kernels.reduce([*addresses, target], target, count, dtype, op)
    combine: Any = {OPS[0]: np.add, OPS[1]: np.minimum, OPS[2]: np.maximum, OPS[3]: np.multiply}[op]
    expected = _values(sources[0], dtype)
    for x in sources[1:]:
        expected = combine(expected, _values(x, dtype))
    if dtype is DType.BOOL:
        expected = (expected != 0).astype(np.float64)
    what = f"reduce {dtype.label} by {op.name} at alignments {shifts[0]} and {shifts[1]}"
    _compare(what, ground.get(target, sources[0]), _rounded(expected, dtype), dtype)


def _edges(ground: Ground, source: DType, target: DType) -> None:
    """Check values half way between neighbours, overflows, infinities and NaNs, bit by bit.

    Each value is repeated eight times, so that vectors contain it.
    """
    bits = np.arange(0, 1 << 16, 257 if ground.on_gpu else 4099, dtype=np.uint32) << 16  # of every exponent
    singles = np.concatenate([bits | low for low in (0, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 1)])
    singles = np.append(singles, np.array([0x7F800001, 0xFF800001, 0x7F7FFFFF, 0x477FEFFF, 0x477FF000], np.uint32))
    with np.errstate(invalid="ignore"):  # for signalling NaNs
        x = np.repeat(singles.view(np.float32), 8).astype(_stored(source))
    there, back = ground.memory(x.nbytes), ground.memory(x.size * target.itemsize)
    ground.put(x, there.address)
    ground.kernels.pack([there.address], [x.size], source, back.address, target, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = _rounded(x, target)
    got, nan = ground.get(back.address, wanted), np.isnan(x)
    wrong = np.where(nan, ~np.isnan(_values(got, target)), got.view(np.uint16) != wanted.view(np.uint16))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise AssertionError(
            f"{source.label} to {target.label}: {int(wrong.sum())} of {wrong.size} are wrong, the first {x[first]!r}: "
            f"{int(got.view(np.uint16)[first]):#06x} for {int(wanted.view(np.uint16)[first]):#06x}"
        )


def _far(ground: Ground, dtype: DType, wire: DType) -> None:
    """Check the elements after the first 4 GiB of a packed run and of a tensor, in both directions."""
    counts = ((4 << 30) // dtype.itemsize + 5, 1001)
    near = [ground.memory(count * dtype.itemsize) for count in counts]
    flat = ground.memory(sum(counts) * wire.itemsize)
    values = _numbers(dtype, 2006, 0)  # the end of the first tensor, and all of the second
    end, item = counts[0] - 1005, dtype.itemsize
    places = [(near[0].address + end * item, values[:1005]), (near[1].address, values[1005:])]
    for address, part in places:
        ground.put(part, address)
    addresses = [memory.address for memory in near]
    ground.kernels.pack(addresses, counts, dtype, flat.address, wire, 1.0)
    expected = _rounded(_values(values, dtype), wire)
    _compare("pack", ground.get(flat.address + end * wire.itemsize, expected), expected, wire)
    for address, part in places:
        ground.put(np.zeros_like(part), address)
    ground.kernels.unpack(flat.address, wire, addresses, counts, dtype, 1.0)
    _compare("unpack", np.concatenate([ground.get(address, part) for address, part in places]), values, dtype)


def _others(shift: int) -> tuple[int, int]:
    return shift, (shift + (1, 2, 4, 8, 12, 6, 3, 7)[shift % 8]) % 16


def _checks(ground: Ground) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield every conversion, and every reduction of every type, at many alignments; without a GPU only few of them."""
    shifts = range(16) if ground.on_gpu else (0, 3)
    count = COUNT if ground.on_gpu else 70
    floats = [dtype for dtype in DType if dtype.is_float]
    pairs = [(dtype, dtype, scale) for dtype in DType for scale in (1.0, 0.5)]
    pairs += [(x, y, 0.25) for x in floats for y in floats if x != y]
    pairs += [(DType.I16, DType.I32, 1.0), (DType.U16, DType.I32, 1.0), (DType.BOOL, DType.U8, 1.0)]
    for dtype, wire, scale in pairs:
        for shift in shifts:
            for other in _others(shift):
                yield "pack", lambda a=(dtype, wire, (shift, other), count, scale): _pack(ground, *a)  # type: ignore[misc]  # mypy has no type for a lambda's default
    for dtype in DType:
        for op in OPS:
            for shift in shifts:
                other = _others(shift)[shift % 2]
                yield "reduce", lambda a=(dtype, op, (shift, other), count): _reduce(ground, *a)  # type: ignore[misc]  # mypy has no type for a lambda's default
    for source in (DType.F32, DType.F64):
        for target in (DType.BF16, DType.F16):
            yield "pack", partial(_edges, ground, source, target)
    for dtype, wire in ((DType.U8, DType.U8), (DType.F16, DType.F32)):  # by the copy kernel, and by a conversion
        yield "far", partial(_far, ground, dtype, wire)


def check_kernels(on_gpu: bool) -> Iterator[Row]:
    """Yield a row for each kind of kernel: pack with unpack, scale and cast; reduce with fill."""
    ground = Ground(on_gpu)
    titles = {"pack": "kernels: pack, unpack, scale, cast", "reduce": "kernels: reduce, fill_identity"}
    if on_gpu and ground.device.driver.memory()[0] > FAR_BYTES:
        titles["far"] = "kernels: a bucket of more than 4 GiB"
    for kind, title in titles.items():
        done, fault = 0, ""
        for run in (run for of, run in _checks(ground) if of == kind):
            try:
                run()
                done += 1
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
                break
        stand_in = "" if on_gpu else f"{done} cases in {ground.name}"
        yield check(title, "as numpy in float64", fault, stand_in)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="use cuda:0")
    tell(check_kernels(parser.parse_args().gpu))


if __name__ == "__main__":
    main()
