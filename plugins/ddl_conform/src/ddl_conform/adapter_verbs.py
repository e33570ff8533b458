"""Tests that every verb (allreduce, allgather and so on) returns the right values for the adapter's tensors.

``ddl_conform.oracle`` computes the right values with numpy. The ranks of a test are threads of one process.
"""

from __future__ import annotations

import numpy as np
import pytest

from ddl_conform import oracle
from ddl_conform.adapter_base import DTYPES, AdapterBase
from ddlcore.api import Operations
from ddlcore.types import Average, DType, Max, Min, Product, ReduceOp, Sum

__all__ = ["AdapterVerbs"]

SHAPES = [(), (5,), (2, 3), (0,), (3, 0, 2)]


def _reduced(arrays: list[oracle.Array], op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0) -> oracle.Array:
    if op is Average:
        return oracle.reduce(arrays, Sum, prescale, postscale / len(arrays))
    return oracle.reduce(arrays, op, prescale, postscale)


class AdapterVerbs(AdapterBase):
    """The tests of the verbs of ``Operations(adapter)``, such as ``allreduce_async``."""

    @DTYPES
    def test_allreduce(self, dtype: DType) -> None:
        """allreduce returns the right values for every op and for all shapes, and does not change its inputs.

        Many operations are in flight at the same time. The shapes include a scalar and empty tensors.
        """
        self.needs(dtype)
        ops = [Sum, Min, Max, Product] + [Average] * (dtype is not DType.BOOL)
        cases = [(op, shape) for op in ops for shape in SHAPES]

        def play(rank: int, size: int, operations: Operations) -> None:
            inputs = [self.make(self.values(dtype, shape, rank)) for _, shape in cases]
            handles = [
                operations.allreduce_async(tensor, op=op, name=f"{i}")
                for i, (tensor, (op, _)) in enumerate(zip(inputs, cases))
            ]
            for (op, shape), tensor, handle in zip(cases, inputs, handles):
                what = f"allreduce {op.name.lower()} of {dtype.label}{list(shape)}"
                expected = _reduced([self.values(dtype, shape, r) for r in range(size)], op)
                self.same(handle.wait(), expected, what, terms=size)
                self.same(tensor, self.values(dtype, shape, rank), f"{what}: the input")

        self.on_ranks(play)

    def test_allreduce_in_place(self) -> None:
        """With ``output=tensor``, allreduce writes the result into ``tensor`` and returns this tensor.

        The same holds for a transposed tensor.
        """

        def play(rank: int, size: int, operations: Operations) -> None:
            tensor = self.make(self.values(DType.F32, (4, 5), rank))
            result = operations.allreduce_async(tensor, output=tensor, op=Sum, name="plain").wait()
            assert result is tensor, "the result of an allreduce in place is another object"
            expected = oracle.reduce([self.values(DType.F32, (4, 5), r) for r in range(size)], Sum)
            self.same(tensor, expected, "allreduce in place", terms=size)
            turned = self.permuted(self.make(self.values(DType.F32, (4, 5), rank)))
            if turned is not None:
                operations.allreduce_async(turned, output=turned, op=Sum, name="turned").wait()
                self.same(turned, expected.T, "allreduce in place of a permuted tensor", terms=size)

        self.on_ranks(play)

    @pytest.mark.parametrize("dtype", [DType.I32, DType.BF16, DType.F32, DType.F64], ids=lambda dtype: dtype.label)
    def test_scales(self, dtype: DType) -> None:
        """allreduce multiplies the inputs by ``prescale_factor``, and the result by ``postscale_factor``."""
        self.needs(dtype)

        def play(rank: int, size: int, operations: Operations) -> None:
            tensor = self.make(self.values(dtype, (50,), rank))
            handle = operations.allreduce_async(
                tensor, op=Sum, name="scaled", prescale_factor=2.0, postscale_factor=0.5
            )
            expected = _reduced([self.values(dtype, (50,), r) for r in range(size)], Sum, 2.0, 0.5)
            self.same(handle.wait(), expected, f"scaled allreduce of {dtype.label}", terms=8 * size)

        self.on_ranks(play)

    @pytest.mark.parametrize("compression", ["fp16", "bf16"])
    def test_compressed_allreduce(self, compression: str) -> None:
        """allreduce with compression sends float32 values in 16 bits, and returns float32 values with a small error."""

        def play(rank: int, size: int, operations: Operations) -> None:
            tensor = self.make(self.values(DType.F32, (100,), rank))
            result = operations.allreduce_async(tensor, op=Sum, name=compression, compression=compression).wait()
            expected = oracle.reduce([self.values(DType.F32, (100,), r) for r in range(size)], Sum)
            off = np.abs(self.to_numpy(result) - expected).max()
            assert off < 0.1, f"allreduce with compression {compression} is off by {off}"

        self.on_ranks(play)

    def test_grouped_allreduce(self) -> None:
        """A grouped allreduce accepts tensors of several types and shapes.

        The call returns the results in the order of the tensors.
        """
        kinds = [(dtype, shape) for dtype in (DType.F32, DType.I64, DType.F64) for shape in ((3,), (2, 2))]

        def play(rank: int, size: int, operations: Operations) -> None:
            tensors = [self.make(self.values(dtype, shape, rank)) for dtype, shape in kinds]
            results = operations.grouped_allreduce_async(tensors, op=Sum, name="group").wait()
            for (dtype, shape), result in zip(kinds, results):
                expected = oracle.reduce([self.values(dtype, shape, r) for r in range(size)], Sum)
                self.same(result, expected, f"grouped allreduce of {dtype.label}{list(shape)}", terms=size)

        self.on_ranks(play)

    @DTYPES
    def test_allgather(self, dtype: DType) -> None:
        """allgather concatenates tensors whose first dimensions differ from rank to rank; rank 0 passes no rows.

        The same holds for a grouped allgather.
        """
        self.needs(dtype)

        def part(rank: int, seed: int = 0) -> oracle.Array:
            return self.values(dtype, (2 * rank, 3), rank, seed)

        def play(rank: int, size: int, operations: Operations) -> None:
            alone = operations.allgather_async(self.make(part(rank)), name="alone")
            group = operations.grouped_allgather_async([self.make(part(rank, seed)) for seed in (1, 2)], name="group")
            self.same(alone.wait(), np.concatenate([part(r) for r in range(size)]), "allgather")
            for seed, result in zip((1, 2), group.wait()):
                self.same(result, np.concatenate([part(r, seed) for r in range(size)]), "grouped allgather")

        self.on_ranks(play)

    @DTYPES
    def test_broadcast(self, dtype: DType) -> None:
        """broadcast works with every rank as the root.

        The call returns a new tensor. With ``output=tensor``, broadcast writes into ``tensor`` and returns this tensor.
        """
        self.needs(dtype)

        def play(rank: int, size: int, operations: Operations) -> None:
            for root in range(size):
                expected = self.values(dtype, (3, 2), root)
                tensor = self.make(self.values(dtype, (3, 2), rank))
                self.same(
                    operations.broadcast_async(tensor, root, name="new").wait(), expected, f"broadcast from {root}"
                )
                self.same(tensor, self.values(dtype, (3, 2), rank), f"broadcast from {root}: the input")
                result = operations.broadcast_async(tensor, root, output=tensor, name="place").wait()
                assert result is tensor, "the result of a broadcast in place is another object"
                self.same(tensor, expected, f"broadcast in place from {root}")

        self.on_ranks(play)

    @DTYPES
    def test_alltoall(self, dtype: DType) -> None:
        """alltoall returns the output and the received splits: how many rows came from each rank.

        The verb is tested with splits that differ, with splits of 0, and without splits, that is with equal parts.
        """
        self.needs(dtype)

        def play(rank: int, size: int, operations: Operations) -> None:
            splits = [[(s + 2 * d) % 3 for d in range(size)] for s in range(size)]
            inputs = [self.values(dtype, (sum(splits[r]), 2), r) for r in range(size)]
            uneven = operations.alltoall_async(self.make(inputs[rank]), splits[rank], name="uneven")
            even = operations.alltoall_async(self.make(self.values(dtype, (2 * size, 2), rank)), name="even")
            output, received = uneven.wait()
            assert list(received) == [splits[s][rank] for s in range(size)], f"received splits {list(received)}"
            parts = [inputs[s][sum(splits[s][:rank]) : sum(splits[s][: rank + 1])] for s in range(size)]
            self.same(output, np.concatenate(parts), f"alltoall with splits {splits}")
            output, received = even.wait()
            assert list(received) == [2] * size, f"received splits {list(received)}"
            blocks = [self.values(dtype, (2 * size, 2), s)[2 * rank : 2 * rank + 2] for s in range(size)]
            self.same(output, np.concatenate(blocks), "alltoall in equal parts")

        self.on_ranks(play)

    @DTYPES
    def test_reducescatter(self, dtype: DType) -> None:
        """reducescatter divides the rows of the result among the ranks.

        If the rows cannot be divided evenly, each of the first ranks gets one row more. The same holds for a grouped
        reducescatter. The test uses seven rows.
        """
        self.needs(dtype)

        def part(rank: int, size: int, op: ReduceOp, seed: int = 0) -> oracle.Array:
            rows = [7 // size + (r < 7 % size) for r in range(size)]
            whole = _reduced([self.values(dtype, (7, 3), r, seed) for r in range(size)], op)
            return whole[sum(rows[:rank]) : sum(rows[: rank + 1])]

        def play(rank: int, size: int, operations: Operations) -> None:
            ops = [Sum, Max] + [Average] * (dtype is not DType.BOOL)
            for op in ops:
                tensor = self.make(self.values(dtype, (7, 3), rank))
                result = operations.reducescatter_async(tensor, op=op, name=op.name).wait()
                self.same(result, part(rank, size, op), f"reducescatter {op.name.lower()} of {dtype.label}", terms=size)
            tensors = [self.make(self.values(dtype, (7, 3), rank, seed)) for seed in (1, 2)]
            for seed, result in zip(
                (1, 2), operations.grouped_reducescatter_async(tensors, op=Sum, name="group").wait()
            ):
                self.same(result, part(rank, size, Sum, seed), f"grouped reducescatter of {dtype.label}", terms=size)

        self.on_ranks(play)

    def test_objects(self) -> None:
        """``broadcast_object`` sends a picklable object of one rank to all ranks.

        ``allgather_object`` returns the objects of all ranks.
        """

        def play(rank: int, size: int, operations: Operations) -> None:
            thing = {"rank": rank, "tensor": [1.5] * rank}
            got = operations.broadcast_object(thing if rank == size - 1 else None, size - 1, name="object")
            assert got == {"rank": size - 1, "tensor": [1.5] * (size - 1)}, f"broadcast_object gave {got}"
            everything = operations.allgather_object(thing, name="objects")
            assert [each["rank"] for each in everything] == list(range(size)), f"allgather_object gave {everything}"

        self.on_ranks(play)

    def test_bad_tensors_are_refused_at_the_call(self) -> None:
        """A verb raises ValueError for a tensor with gaps, and for a tensor of an unsupported type.

        After these errors, the job still works.
        """

        def play(rank: int, size: int, operations: Operations) -> None:
            gaps = self.sliced(self.make(self.values(DType.F32, (8,), rank)))
            if gaps is not None:
                with pytest.raises(ValueError, match="contiguous"):
                    operations.allreduce_async(gaps, name="gaps")
            with pytest.raises(ValueError, match="not supported"):
                operations.allreduce_async(self.unsupported(), name="foreign")
            whole = operations.allreduce_async(
                self.make(self.values(DType.I32, (8,), rank)), op=Sum, name="gaps"
            ).wait()
            expected = oracle.reduce([self.values(DType.I32, (8,), r) for r in range(size)], Sum)
            self.same(whole, expected, "allreduce after refused ones")

        self.on_ranks(play)
