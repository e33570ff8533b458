"""The conformance suite of compressors. To test a compressor, write a subclass that sets ``compressor``."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from ddl_conform import oracle
from ddl_conform.group import Area
from ddl_conform.standard import StandardSuite
from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.types import DType, Sum

__all__ = ["CompressorSuite"]

DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
FLOATS = pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32, DType.F64], ids=lambda dtype: dtype.label)


class CompressorSuite(StandardSuite):
    """The tests that every compressor must pass.

    A subclass sets ``compressor``, and also ``error`` if the compressor is lossy.
    """

    compressor: ClassVar[type[Compressor]]
    error: ClassVar[float] = 0.0  # greatest decode(encode(x)) - x of a narrowed value, relative to the largest x

    def kernels(self) -> Kernels:
        from ddlcore.kernels.cpu import CpuKernels

        return CpuKernels()

    def make(self) -> Compressor:
        return type(self).compressor(self.kernels())

    # --- used by the standard tests

    def encoded(self, compressor: Compressor, source: Area, scale: float = 1.0, name: str = "t") -> Area:
        """Encode ``source`` by ``compressor``, and return the encoded values.

        ``compressor`` gets the factor ``scale`` and the tensor's name ``name``. Raises AssertionError if ``encode`` has
        changed ``source`` or memory outside its target.
        """
        before = source.array.copy()
        wire = compressor.wire_dtype(source.buffer.dtype)
        count = compressor.encoded_count(source.buffer.dtype, source.buffer.count) if source.buffer.count else 0
        target = Area(np.frombuffer(b"\x5b" * wire.itemsize * count, oracle.numpy_dtype(wire)))
        compressor.encode(name, source.buffer, target.buffer, scale)
        changed = oracle.difference(source.array, before)
        assert not changed, f"encode changed its source: {changed}"
        assert not target.damage(), f"encode: {target.damage()}"
        return target

    def decoded(
        self, compressor: Compressor, wire: Area, dtype: DType, count: int, scale: float = 1.0, name: str = "t"
    ) -> Area:
        target = Area(np.frombuffer(b"\x5b" * dtype.itemsize * count, oracle.numpy_dtype(dtype)))
        compressor.decode(name, wire.buffer, target.buffer, scale)
        assert not target.damage(), f"decode: {target.damage()}"
        return target

    def allowed(self, compressor: Compressor, values: oracle.Array, terms: int = 1) -> float:
        """Return the greatest absolute error that a result may have if it was added from ``terms`` values.

        ``values`` are the exact results. The allowed error depends on their type and on the largest of them.
        """
        dtype = DType.of(values.dtype.name)
        if not values.size or not dtype.is_float:
            return 0.0
        narrowed = compressor.wire_dtype(dtype) != dtype
        own = {DType.F16: 2.0**-10, DType.BF16: 2.0**-7, DType.F32: 2.0**-23, DType.F64: 2.0**-52}[dtype]
        return float(terms * max(own, self.error if narrowed else 0.0) * np.abs(values.astype(np.float64)).max())

    def close(self, compressor: Compressor, actual: oracle.Array, expected: oracle.Array, terms: int = 1) -> None:
        error = np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max(initial=0.0)
        allowed = self.allowed(compressor, expected, terms)
        assert error <= allowed, f"values are off by {error:g}, more than {allowed:g}"

    # --- the standard tests

    def test_it_has_a_name(self) -> None:
        """The attribute ``name`` of a compressor is not empty. A verb selects the compressor by this name."""
        assert self.make().name, f"{type(self).compressor.__name__}.name is empty"

    @DTYPES
    def test_nothing_travels_wider(self, dtype: DType) -> None:
        """The wire type, in which values are sent, has at most as many bytes as the tensor's type.

        Only floats may have a wire type that differs from the tensor's type. An encoded tensor of 1001 elements has at
        most as many bytes as the tensor itself.
        """
        wire = self.make().wire_dtype(dtype)
        assert isinstance(wire, DType), f"wire_dtype gave {wire!r}"
        assert wire.itemsize <= dtype.itemsize, f"{dtype.label} travels as {wire.label}"
        assert dtype.is_float or wire is dtype, f"{dtype.label} travels as {wire.label}: counts must arrive as they are"
        counts = {count: self.make().encoded_count(dtype, count) for count in (1, 7, 1001)}
        if self.make().summable or wire is dtype:
            assert all(n == count for count, n in counts.items()), f"{dtype.label}: other counts on the wire: {counts}"
        assert counts[1001] * wire.itemsize <= 1001 * dtype.itemsize, f"1001 {dtype.label} become more: {counts}"

    @DTYPES
    def test_there_and_back(self, dtype: DType) -> None:
        """``decode`` returns the values that were passed to ``encode``, for every type and for odd counts.

        If the wire type is the tensor's type, every bit is the same. If the types differ, the error is at most the
        result of ``allowed``.
        """
        for count in (0, 1, 7, 1001):
            compressor = self.make()
            source = Area(oracle.values(dtype, count, 0), offset=1)
            back = self.decoded(compressor, self.encoded(compressor, source), dtype, count)
            if compressor.wire_dtype(dtype) is dtype:
                fault = oracle.difference(back.array, source.array)
                assert not fault, f"{count} {dtype.label}, which travel as they are: {fault}"
            self.close(compressor, back.array, source.array)

    @FLOATS
    def test_scales_apply(self, dtype: DType) -> None:
        """``encode`` and ``decode`` both multiply the values by their argument ``scale``."""
        values = oracle.values(dtype, 1001, 0)
        compressor = self.make()
        halves = self.decoded(compressor, self.encoded(compressor, Area(values), scale=0.5), dtype, 1001)
        self.close(compressor, halves.array, values * values.dtype.type(0.5))
        compressor = self.make()
        threefold = self.decoded(compressor, self.encoded(compressor, Area(values)), dtype, 1001, scale=3.0)
        self.close(compressor, threefold.array, values * values.dtype.type(3.0))

    @FLOATS
    def test_encoded_values_add_up(self, dtype: DType) -> None:
        """If ``summable`` is true, encoded values of several ranks can be added before they are decoded.

        The test adds the encoded values of three ranks. The decoded sum is nearly the sum of the ranks' values.
        """
        compressors = [self.make() for _ in range(3)]
        if not compressors[0].summable:
            pytest.skip("not summable: shards are decoded before they are added")
        values = [oracle.values(dtype, 1001, rank) for rank in range(3)]
        on_wire = [self.encoded(c, Area(array)) for c, array in zip(compressors, values)]
        total = Area(oracle.reduce([area.array for area in on_wire], Sum))
        back = self.decoded(compressors[0], total, dtype, 1001)
        expected = sum(array.astype(np.float64) for array in values)
        largest = Area(np.array([np.abs(array.astype(np.float64)).max() for array in values]).astype(values[0].dtype))
        error = np.abs(back.array.astype(np.float64) - expected).max()
        allowed = self.allowed(compressors[0], largest.array, terms=8)
        assert error <= allowed, f"sums are off by {error:g}, more than {allowed:g}"

    @FLOATS
    def test_a_void_bucket_leaves_no_trace(self, dtype: DType) -> None:
        """``commit(name, False)`` restores the state that the compressor had before the last ``encode`` of this tensor.

        So if the same values are encoded again, the result is the same.
        """
        first, second = (Area(oracle.values(dtype, 500, 0, seed=seed)) for seed in (1, 2))
        compressor = self.make()
        self.encoded(compressor, first)
        compressor.commit("t", True)
        void = self.encoded(compressor, second).array.copy()
        compressor.commit("t", False)
        again = self.encoded(compressor, second).array
        fault = oracle.difference(again, void)
        assert not fault, f"after a void bucket the same values are encoded otherwise: {fault}"

    @FLOATS
    def test_names_do_not_meet(self, dtype: DType) -> None:
        """The state that a compressor keeps for one tensor does not affect a tensor with another name."""
        first, second = (Area(oracle.values(dtype, 300, 0, seed=seed)) for seed in (1, 2))
        alone, both = self.make(), self.make()
        expected = self.encoded(alone, second, name="b").array
        self.encoded(both, first, name="a")
        both.commit("a", True)
        fault = oracle.difference(self.encoded(both, second, name="b").array, expected)
        assert not fault, f"tensor b is encoded otherwise when a came before: {fault}"
