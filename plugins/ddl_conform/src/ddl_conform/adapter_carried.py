"""Tests of tensors whose element type no transport knows: complex numbers, wide unsigned integers, floats of 8 bits.

Such tensors travel as elements of another type, see ``ddlcore.types.carrier_of``. The ranks of a test are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ddl_conform.adapter_base import AdapterBase, Tensor
from ddlcore.api import Operations
from ddlcore.contracts.transport import view
from ddlcore.errors import MismatchError
from ddlcore.types import Average, Max, Min, Product, ReduceOp, Sum, carrier_of

__all__ = ["ELEMENTS", "AdapterCarried"]

Array = Any

FLOATS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e8m0fnu")
COMPLEX = ("complex64", "complex128")
MOVED = ("uint32", "uint64", *(f"float8_{kind}" for kind in FLOATS))
ELEMENTS = frozenset([*COMPLEX, *MOVED])  # all types that are tested
EACH = pytest.mark.parametrize("element", [*COMPLEX, *MOVED])
PAIRS = pytest.mark.parametrize("element", COMPLEX)


def _dtype(element: str) -> Any:
    if not element.startswith("float8"):
        return np.dtype(element)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, element))


def _values(element: str, shape: tuple[int, ...], rank: int = 0) -> Array:
    """Return an array of the type ``element`` with any bits, also those of NaN; finite numbers for a complex type."""
    random, count = np.random.default_rng([rank, *shape]), int(np.prod(shape))
    if element in COMPLEX:
        return (random.normal(size=count) + 1j * random.normal(size=count)).astype(element).reshape(shape)
    dtype = _dtype(element)
    return np.frombuffer(random.bytes(count * dtype.itemsize), dtype).reshape(shape)


class AdapterCarried(AdapterBase):
    """The tests of the types in ``AdapterBase.elements``. All of them are skipped if there are none."""

    def needs_element(self, element: str) -> None:
        if element not in self.elements:
            pytest.skip(f"the framework's tensors are never {element}, or this adapter does not offer them")
        if element.startswith("float8"):
            values = pytest.importorskip("ml_dtypes", reason=f"the values of {element} are made by ml_dtypes")
            if not hasattr(values, element):
                pytest.skip(f"ml_dtypes {values.__version__} has no {element}")

    def same_bits(self, tensor: Tensor, expected: Array, what: str) -> None:
        """Raise AssertionError if type, shape or any bit of ``tensor`` differs. The message begins with ``what``."""
        found = self.to_numpy(tensor)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), f"{what}: {found.dtype}{found.shape}"
        assert found.tobytes() == expected.tobytes(), f"{what}: {found} instead of {expected}"

    def close(self, tensor: Tensor, expected: Array, what: str) -> None:
        """Raise AssertionError if ``tensor`` differs from ``expected`` by more than the rounding errors of a few sums."""
        found = self.to_numpy(tensor)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), f"{what}: {found.dtype}{found.shape}"
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-5), f"{what}: {found} instead of {expected}"

    @EACH
    @pytest.mark.parametrize("shape", [(), (7,), (0,), (2, 3)])
    def test_a_carried_tensor_is_described(self, element: str, shape: tuple[int, ...]) -> None:
        """``buffer`` names the tensor's own type, and describes the carrier's elements in the tensor's own memory."""
        self.needs_element(element)
        carrier = carrier_of(element)
        assert carrier is not None
        tensor, values = self.make(_values(element, shape)), _values(element, shape, 1)
        buffer = self.adapter.buffer(tensor, elementwise=True)
        assert (buffer.element, buffer.dtype, buffer.strides) == (element, carrier.dtype, None)
        assert tuple(buffer.shape) == (*shape, *([2] if carrier.is_complex else [])), buffer.shape
        assert buffer.count == values.size * carrier.parts, f"{buffer.count} elements of {carrier.dtype.label}"
        if values.size:
            view(buffer.address, buffer.nbytes)[:] = values.tobytes()
            self.same_bits(tensor, values, "after writing through the buffer")
            assert self.adapter.address(tensor, buffer) == buffer.address, "another address at the second time"

    @PAIRS
    def test_a_permuted_complex_tensor(self, element: str) -> None:
        """``buffer`` accepts a transposed complex tensor: the parts of a number lie beside each other."""
        self.needs_element(element)
        tensor = self.permuted(self.make(_values(element, (3, 4))))
        if tensor is None:
            pytest.skip("the framework's tensors are always row-major")
        buffer = self.adapter.buffer(tensor, elementwise=True)
        assert (tuple(buffer.shape), buffer.strides) == ((4, 3, 2), (2, 8, 1))
        with pytest.raises(ValueError, match="contiguous"):
            self.adapter.buffer(tensor, elementwise=False)

    @PAIRS
    def test_pairs_of_numbers_are_another_type(self, element: str) -> None:
        """``address`` never takes a tensor of pairs of floats for a complex tensor, nor a complex one for pairs."""
        self.needs_element(element)
        carrier = carrier_of(element)
        assert carrier is not None
        numbers = self.make(_values(element, (3,)))
        pairs = self.make(np.zeros((3, 2), carrier.dtype.label))
        for one, other in ((numbers, pairs), (pairs, numbers)):
            assert self.adapter.address(one, self.adapter.buffer(other, elementwise=True)) is None

    @EACH
    def test_carried_tensors_are_moved(self, element: str) -> None:
        """allgather, broadcast and alltoall give every bit of the ranks' tensors, in the tensors' own type."""
        self.needs_element(element)

        def play(rank: int, size: int, operations: Operations) -> None:
            own = [_values(element, (2 * r, 3), r) for r in range(size)]
            for name in ("first", "again", "again"):  # the last call uses what the second has kept
                result = operations.allgather(self.make(own[rank]), name=name)
                self.same_bits(result, np.concatenate(own), "allgather")
            group = operations.grouped_allgather_async([self.make(own[rank])] * 2, name="group").wait()
            for result in group:
                self.same_bits(result, np.concatenate(own), "grouped allgather")
            for shape in ((), (3, 2)):
                wanted = _values(element, shape, size - 1)
                tensor = self.make(_values(element, shape, rank))
                new = operations.broadcast(tensor, size - 1, name=f"new{len(shape)}")
                self.same_bits(new, wanted, "broadcast")
                operations.broadcast(tensor, size - 1, output=tensor, name=f"place{len(shape)}")
                self.same_bits(tensor, wanted, "broadcast in place")
            blocks = [_values(element, (2 * size, 2), r) for r in range(size)]
            output, received = operations.alltoall(self.make(blocks[rank]), name="exchange")
            assert list(received) == [2] * size
            self.same_bits(output, np.concatenate([b[2 * rank : 2 * rank + 2] for b in blocks]), "alltoall")

        self.on_ranks(play)

    @PAIRS
    def test_complex_numbers_are_added(self, element: str) -> None:
        """allreduce and reducescatter give sums and averages of complex tensors, with and without factors."""
        self.needs_element(element)

        def play(rank: int, size: int, operations: Operations) -> None:
            for shape in ((), (4,), (3, 5), (0, 2)):
                total = sum(_values(element, shape, r) for r in range(size))
                expected = {Sum: np.asarray(total, element), Average: np.asarray(total / size, element)}
                for op, wanted in expected.items():
                    tensor = self.make(_values(element, shape, rank))
                    name = f"{op.name}{shape}"
                    self.close(operations.allreduce_async(tensor, op=op, name=name).wait(), wanted, name)
                    for _ in range(2):
                        tensor = self.make(_values(element, shape, rank))
                        operations.allreduce_in_place(tensor, op=op, name=f"{name} in place")
                        self.close(tensor, wanted, f"{name} in place")
            rows = [5 // size + (r < 5 % size) for r in range(size)]
            mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
            total = sum(_values(element, (5, 2), r) for r in range(size))
            for name in ("once", "kept", "kept"):
                tensor = self.make(_values(element, (5, 2), rank))
                part = operations.reducescatter(tensor, op=Sum, name=name, prescale_factor=2.0)
                self.close(part, 2 * np.asarray(total)[mine], "reducescatter")

        self.on_ranks(play)

    @EACH
    def test_what_has_no_meaning_is_refused(self, element: str) -> None:
        """A reduction without a meaning for the type, and a scalar without rows, raise ValueError at the call."""
        self.needs_element(element)
        ops: list[ReduceOp] = [Min, Max, Product] + ([] if element in COMPLEX else [Sum, Average])

        def play(rank: int, size: int, operations: Operations) -> None:
            tensor, scalar = self.make(_values(element, (4,))), self.make(_values(element, ()))
            calls: list[Callable[..., Any]] = [operations.allreduce_async, operations.reducescatter_async]
            for op in ops:
                for call in calls:
                    with pytest.raises(ValueError, match=element):
                        call(tensor, op=op, name="x")
                with pytest.raises(ValueError, match=element):
                    operations.allreduce_in_place(tensor, op=op, name="x")
            with pytest.raises(ValueError, match="at least one dimension"):
                operations.allgather(scalar, name="x")
            everything = np.concatenate([_values(element, (4,))] * size)
            self.same_bits(operations.allgather(tensor, name="x"), everything, "after refused calls")

        self.on_ranks(play)

    @PAIRS
    def test_ranks_that_disagree_are_told(self, element: str) -> None:
        """A complex tensor on one rank and pairs of floats on another are a mismatch, which names both types."""
        self.needs_element(element)
        carrier = carrier_of(element)
        assert carrier is not None
        pairs = carrier.dtype.label

        def play(rank: int, size: int, operations: Operations) -> None:
            tensor = self.make(_values(element, (3,)) if rank == 0 else np.zeros((3, 2), pairs))
            with pytest.raises(MismatchError) as caught:
                operations.allreduce_async(tensor, op=Sum, name="x").wait()
            assert element in str(caught.value), caught.value
            assert pairs in str(caught.value), caught.value
            assert "(3,2)" in str(caught.value), caught.value

        self.on_ranks(play)
