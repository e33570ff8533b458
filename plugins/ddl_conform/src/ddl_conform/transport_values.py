"""Tests that every collective returns the right values, which ``ddl_conform.oracle`` computes with numpy.

If the capability ``order_fixed`` of the transport is true, every bit of a result must be right. If it is false,
rounding errors are allowed.
"""

from __future__ import annotations

import time
from itertools import chain

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ddl_conform import oracle
from ddl_conform.group import Case, finish
from ddl_conform.transport_base import DTYPES, OPS, only_where
from ddl_conform.transport_cases import TransportCases, addresses
from ddlcore.contracts.transport import Plan, Transport
from ddlcore.types import DType, ReduceOp

__all__ = ["TransportValues"]

# A failure may take until the deadline of a test, so hypothesis does not try to shrink a failing example.
EXAMPLES = settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])

# For collectives that only move data, types differ only in their width.
MOVED = pytest.mark.parametrize("dtype", [DType.U8, DType.F16, DType.F32, DType.I64], ids=lambda dtype: dtype.label)
CROSSING_BYTES = 16 << 20  # more than the buffers of two sockets hold: Linux lets them grow to 4 and 6 MiB
SIXTEEN_BITS = pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.label)


class TransportValues(TransportCases):
    """The tests of the results of the collectives, of the memory that they write, and of the order of additions."""

    # --- allreduce

    @DTYPES
    @OPS
    def test_allreduce(self, dtype: DType, op: ReduceOp) -> None:
        """allreduce returns the right values for every type, every op, and 0, 1, 7 and 1000 elements.

        The target is separate from the source in one case, and the same memory in the other case.
        """
        self.needs(dtype, op)
        for size in self.sizes:
            counts = (0, 1, 7, 1000)
            self.check(
                size, [self.reducing(size, dtype, op, count, place) for count in counts for place in (False, True)]
            )

    @DTYPES
    def test_large_allreduce(self, dtype: DType) -> None:
        """allreduce returns the right values for tensors of about one chunk and of several chunks.

        A chunk is the size (``chunk_bytes``) at which the transport cuts large tensors.
        """
        self.needs(dtype)
        for size in self.sizes:
            counts = enumerate(self.around_chunks(dtype))
            self.check(size, [self.reducing(size, dtype, ReduceOp.Sum, count, i % 2 == 1) for i, count in counts])

    @DTYPES
    def test_addresses_off_the_cache_line(self, dtype: DType) -> None:
        """A buffer may begin at any element of a cache line. allreduce writes nothing outside its buffers."""
        self.needs(dtype)
        for size in self.sizes:
            places = [(1, 0), (0, 1), (3, 5)]
            self.check(size, [self.reducing(size, dtype, ReduceOp.Sum, 1001, offsets=offsets) for offsets in places])

    @SIXTEEN_BITS
    def test_sixteen_bit_sums_are_rounded_once(self, dtype: DType) -> None:
        """allreduce adds 16-bit floats in float32, and rounds only the sum to 16 bits.

        So if small values are added to a large value, the small values are not lost.
        """
        self.needs(dtype)
        native = oracle.numpy_dtype(dtype)
        large = 2048 if dtype is DType.F16 else 256  # the first integer whose successor the type cannot represent
        for size in self.sizes:
            sources = [np.full(5, large if rank == 0 else 1).astype(native) for rank in range(size)]
            expected = np.full(5, large + size - 1, np.float32).astype(native)
            if self.adding(size) is not None:  # rounded once on each host, and once across hosts
                expected = oracle.reduce(sources, ReduceOp.Sum, hosts=self.adding(size))
            self.check(size, [self.summing(f"{large} and ones, {dtype.label}", sources, expected)])

    @pytest.mark.parametrize("dtype", [d for d in DType if d.is_float], ids=lambda dtype: dtype.label)
    @pytest.mark.parametrize("op", [ReduceOp.Min, ReduceOp.Max], ids=["min", "max"])
    def test_a_nan_is_not_lost(self, dtype: DType, op: ReduceOp) -> None:
        """If one rank has a NaN, the result of Min and of Max is NaN on all ranks, as in numpy."""
        self.needs(dtype, op)
        for size in self.sizes:
            self.check(size, [self.choosing(size, dtype, op, count) for count in (10, self.around_chunks(dtype)[-1])])

    def test_a_late_rank_is_waited_for(self) -> None:
        """All ranks wait for a rank that makes its call later, and get the values that this rank has at its call."""
        for size, late in [(n, late) for n in self.sizes for late in range(n)]:
            case = self.reducing(size, DType.I32, ReduceOp.Sum, 50_000, seed=late)

            def play(rank: int, transport: Transport, case: Case = case, late: int = late) -> None:
                if rank == late:
                    values = case.sources[rank].array.copy()
                    case.sources[rank].array[:] = 7
                    time.sleep(0.02)
                    case.sources[rank].array[:] = values
                case.run(rank, transport)

            self.play(size, play)
            case.check()

    # --- the other collectives

    @DTYPES
    def test_allgatherv(self, dtype: DType) -> None:
        """allgatherv returns the right values for equal and unequal counts. Some counts or all counts may be 0."""
        for size in self.sizes:
            counts = [[5] * size, [3 * rank + 1 for rank in range(size)], [0] * size]
            counts += [[0 if rank == empty else 4 for rank in range(size)] for empty in range(size)]
            self.check(size, [self.gathering(size, dtype, each) for each in counts])

    @MOVED
    def test_large_allgatherv(self, dtype: DType) -> None:
        """allgatherv returns the right values for unequal counts of one chunk or more.

        A chunk is the size at which the transport cuts large tensors. With such counts, the ranks have different
        numbers of chunks.
        """
        for size in self.sizes:
            counts = self.chunky(size, dtype)
            self.check(size, [self.gathering(size, dtype, counts), self.gathering(size, dtype, counts[::-1])])

    def test_large_messages_cross(self) -> None:
        """allgatherv of 16 MiB from each rank does not hang, and returns the right values.

        If all ranks of a transport send before they receive, small messages work, because they fit into the buffers of
        the operating system. With larger messages, all ranks would wait in ``send`` forever.
        """
        size = min((size for size in self.sizes if size > 1), default=None)
        if size is None:
            pytest.skip("sizes: a single rank sends nothing")
        # Counting up is far quicker than random values, and still shows a part that arrives at the wrong place.
        self.check(
            size, [self.moving_all([np.arange(rank, CROSSING_BYTES // 4, dtype=np.int32) for rank in range(size)])]
        )

    @DTYPES
    def test_broadcast(self, dtype: DType) -> None:
        """broadcast returns the right values with every rank as the root, for 0, 1 and 1000 elements."""
        for size in self.sizes:
            ways = [(count, root) for root in range(size) for count in (0, 1, 1000)]
            self.check(size, [self.broadcasting(size, dtype, count, root) for count, root in ways])

    @MOVED
    def test_large_broadcast(self, dtype: DType) -> None:
        """broadcast returns the right values for tensors of about one chunk and of several chunks.

        The root is the first or the last rank.
        """
        for size in self.sizes:
            ways = [(count, root) for count in self.around_chunks(dtype) for root in (0, size - 1)]
            self.check(size, [self.broadcasting(size, dtype, count, root) for count, root in ways])

    @pytest.mark.parametrize("dtype", [DType.I32, DType.BF16, DType.F32, DType.BOOL], ids=lambda dtype: dtype.label)
    @OPS
    def test_reducescatterv(self, dtype: DType, op: ReduceOp) -> None:
        """reducescatterv returns the right values if the ranks' parts of the result are equal, unequal or empty."""
        self.needs(dtype, op)
        for size in self.sizes:
            counts = [[3] * size, [2 * rank + 1 for rank in range(size)], [0] * size, [9, *[0] * (size - 1)]]
            self.check(size, [self.scattering(size, dtype, each, op) for each in counts])

    @SIXTEEN_BITS
    def test_large_reducescatterv(self, dtype: DType) -> None:
        """reducescatterv returns the right values if the ranks' parts have different sizes, of about a chunk or more.

        The sizes are tested in two orders: from the first to the last rank, and reversed.
        """
        self.needs(dtype)
        for size in self.sizes:
            counts = self.chunky(size, dtype)
            self.check(size, [self.scattering(size, dtype, each, ReduceOp.Sum) for each in (counts, counts[::-1])])

    @DTYPES
    def test_alltoallv(self, dtype: DType) -> None:
        """alltoallv returns the right values for many kinds of ``counts``.

        For example, all pairs of ranks exchange data, each rank sends only to the next rank, one rank sends nothing,
        one rank receives nothing, or all counts are 0.
        """
        for size in self.sizes:
            ranks = range(size)
            matrices = [
                [[3] * size for _ in ranks],
                [[s + 2 * d + 1 for d in ranks] for s in ranks],
                [[4 if d == (s + 1) % size else 0 for d in ranks] for s in ranks],
                [[0 if s == 0 else 2 for _ in ranks] for s in ranks],
                [[0 if d == 0 else 2 for d in ranks] for _ in ranks],
                [[0] * size for _ in ranks],
            ]
            self.check(size, [self.exchanging(size, dtype, matrix) for matrix in matrices])

    @MOVED
    def test_large_alltoallv(self, dtype: DType) -> None:
        """alltoallv returns the right values if a rank sends a different amount of data to each rank.

        The amounts are about one chunk or more. A chunk is the size at which the transport cuts large tensors.
        """
        for size in self.sizes:
            counts = self.chunky(size, dtype)
            matrix = [[counts[(s + d) % size] for d in range(size)] for s in range(size)]
            self.check(size, [self.exchanging(size, dtype, matrix)])

    def test_barrier(self) -> None:
        """barrier is complete on a rank only after all ranks have called barrier."""
        for size in self.sizes:
            come = [0] * size
            faults: list[str] = []

            def play(rank: int, transport: Transport, come: list[int] = come, faults: list[str] = faults) -> None:
                for number in range(1, 21):
                    if number % len(come) == rank:
                        time.sleep(0.002)
                    come[rank] = number
                    finish(transport.barrier())
                    if min(come) < number:
                        faults.append(f"rank {rank} passed barrier {number} when the ranks were at {come}")

            self.play(size, play)
            assert not faults, faults[0]

    # --- programs

    def test_programs(self) -> None:
        """Random sequences of collectives return the right values, with random types and counts.

        Each rank calls the collectives one directly after the other.
        """
        capabilities = self.capabilities()

        @EXAMPLES
        @given(
            st.sampled_from(self.sizes).flatmap(
                lambda size: st.lists(self.cases(size, capabilities), min_size=1, max_size=6)
            )
        )
        def programs(cases: list[Case]) -> None:
            self.check(len(cases[0].sources), cases)

        programs()

    # --- buckets

    @only_where("vectored")
    @pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.I64], ids=lambda dtype: dtype.label)
    def test_prepared_plans_run_again(self, dtype: DType) -> None:
        """Two prepared plans can run in turn, each time with new addresses and new values.

        In some runs the targets are separate from the sources, and in other runs they are the same memory.
        """
        self.needs_vectored(dtype)
        one = self.chunk_bytes // dtype.itemsize
        plans = [Plan((5, 0, one + 1, 1, one // 2), dtype, ReduceOp.Sum), Plan((0, 3, 3), dtype, ReduceOp.Max)]
        for size in self.sizes:
            rounds = [[self.bucket(size, plan, n % 2 == 1, seed=n) for plan in plans] for n in range(4)]

            def play(rank: int, transport: Transport, rounds: list[list[Case]] = rounds) -> None:
                prepared = [transport.prepare(plan) for plan in plans]
                for cases in rounds:
                    for plan, ready, case in zip(plans, prepared, cases):
                        finish(ready.start(*(addresses(plan, each.buffer) for each in case.memory(rank))))

            self.play(size, play)
            for case in chain(*rounds):
                case.check()

    @only_where("vectored")
    def test_scattered_tensors_of_a_plan(self) -> None:
        """The tensors of a plan may be anywhere in memory. The transport does not write to the memory between them."""
        self.needs_vectored(DType.F32)
        plan = Plan((7, 1, 0, 1000), DType.F32, ReduceOp.Sum)
        for size in self.sizes:
            parts = [
                self.reducing(size, DType.F32, plan.op, n, seed=i, offsets=(i, 2)) for i, n in enumerate(plan.counts)
            ]

            def play(rank: int, transport: Transport, parts: list[Case] = parts) -> None:
                pairs = [part.memory(rank) for part in parts]
                work = transport.prepare(plan).start(
                    [source.buffer.address for source, _ in pairs], [target.buffer.address for _, target in pairs]
                )
                finish(work)

            self.play(size, play)
            for part in parts:
                part.check()

    @only_where("vectored", "scales")
    @SIXTEEN_BITS
    def test_plans_are_scaled(self, dtype: DType) -> None:
        """If the capability ``scales`` is true, the transport applies the scale factors of a prepared plan.

        The inputs are multiplied by ``prescale``, and the result is multiplied by ``postscale``.
        """
        self.needs_vectored(dtype)
        if not self.capabilities().scales:
            pytest.skip("capabilities: scaling is the executor's business")
        for size in self.sizes:
            plan = Plan((9, 0, 1000), dtype, ReduceOp.Sum, prescale=0.5, postscale=1 / size)
            self.check(size, [self.bucket(size, plan), self.bucket(size, plan, in_place=True)])

    @only_where("order_fixed")
    @pytest.mark.parametrize("dtype", [DType.F32, DType.F64, DType.BF16], ids=lambda dtype: dtype.label)
    def test_bits_do_not_depend_on_the_bucket(self, dtype: DType) -> None:
        """If the capability ``order_fixed`` is true, the bits of a sum do not depend on how tensors share buckets.

        The test reduces the same values in one tensor, in several tensors one after the other, and in one bucket. All
        bits must be the same as if the values were added in the order of the ranks. If ``host_first`` is true, the
        values are added on each host first.
        """
        self.needs(dtype)
        if not self.capabilities().order_fixed:
            pytest.skip("capabilities: the order of addition is not fixed")
        whole = self.chunk_bytes // dtype.itemsize + 5000
        counts = (1, 17, whole - 5018, 5000)
        for size in self.sizes:
            cases = [self.reducing(size, dtype, ReduceOp.Sum, whole)]
            if self.capabilities().vectored:
                cases.append(self.bucket(size, Plan(counts, dtype, ReduceOp.Sum)))
            sources = self.inputs(size, dtype, whole)
            for i, count in enumerate(counts):
                piece = slice(sum(counts[:i]), sum(counts[:i]) + count)
                expected = oracle.reduce(sources, ReduceOp.Sum, hosts=self.adding(size))[piece]
                label = f"elements {piece.start} to {piece.stop} of the same tensors"
                cases.append(self.summing(label, [source[piece] for source in sources], expected))
            self.check(size, cases)
