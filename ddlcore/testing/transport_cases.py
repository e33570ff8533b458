"""Makes the cases of the transport tests: one collective on every rank, its inputs, and the results to expect."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ddlcore.contracts.transport import Capabilities, Plan, Transport, Work
from ddlcore.testing import oracle
from ddlcore.testing.group import Call, Case
from ddlcore.testing.transport_base import TransportBase
from ddlcore.types import Buffer, DType, ReduceOp

__all__ = ["TransportCases", "addresses"]


def _allreduce(op: ReduceOp) -> Call:
    return lambda transport, source, target: transport.allreduce(source, target, op)


def _allgatherv(counts: Sequence[int]) -> Call:
    return lambda transport, source, target: transport.allgatherv(source, target, counts)


def _broadcast(root: int) -> Call:
    return lambda transport, source, target: transport.broadcast(target, root)


def _reducescatterv(counts: Sequence[int], op: ReduceOp) -> Call:
    return lambda transport, source, target: transport.reducescatterv(source, target, counts, op)


def _alltoallv(counts: Sequence[Sequence[int]]) -> Call:
    return lambda transport, source, target: transport.alltoallv(source, target, counts)


def addresses(plan: Plan, buffer: Buffer) -> list[int]:
    """Return the addresses of the plan's tensors, which lie one after the other in ``buffer``."""
    return [buffer.address + sum(plan.counts[:i]) * plan.dtype.itemsize for i in range(len(plan.counts))]


def _planned(plan: Plan) -> Call:
    def call(transport: Transport, source: Buffer, target: Buffer) -> Work:
        return transport.prepare(plan).start(addresses(plan, source), addresses(plan, target))

    return call


class TransportCases(TransportBase):
    """The methods that make the cases of the transport tests, one method for each collective.

    ``counts`` are numbers of elements, by rank. Different values of ``seed`` give different inputs.
    """

    def inputs(self, size: int, dtype: DType, count: int, seed: int = 0) -> list[oracle.Array]:
        """Return ``count`` values for each of ``size`` ranks."""
        return [oracle.values(dtype, count, rank, seed=seed) for rank in range(size)]

    def summing(self, label: str, sources: Sequence[oracle.Array], expected: oracle.Array) -> Case:
        """Return an allreduce with the op Sum of ``sources``, one array for each rank.

        ``expected`` is their sum. It does not depend on the order of addition, or was added in the transport's order.
        """
        return Case.of(label, _allreduce(ReduceOp.Sum), sources, [expected] * len(sources))

    def reducing(
        self,
        size: int,
        dtype: DType,
        op: ReduceOp,
        count: int,
        in_place: bool = False,
        seed: int = 0,
        offsets: tuple[int, int] = (0, 0),
    ) -> Case:
        """Return an allreduce of ``count`` elements.

        ``offsets`` says for the sources and for the targets how many elements after the beginning of a cache line they
        begin.
        """
        sources = self.inputs(size, dtype, count, seed)
        expected = [oracle.reduce(sources, op, hosts=self.adding(size))] * size
        label = f"allreduce {op.name.lower()} of {count} {dtype.label}"
        exact = self.capabilities().order_fixed
        return Case.of(label, _allreduce(op), sources, expected, in_place=in_place, exact=exact, offsets=offsets)

    def choosing(self, size: int, dtype: DType, op: ReduceOp, count: int) -> Case:
        """Return an allreduce with Min or Max, in which each rank has a NaN at a different position."""
        sources = self.inputs(size, dtype, count)
        for rank, source in enumerate(sources):
            source[rank] = float("nan")
        expected = oracle.reduce(sources, op)
        expected[:size] = float("nan")
        label = f"allreduce {op.name.lower()} of {count} {dtype.label}, of which {size} are no numbers"
        return Case.of(label, _allreduce(op), sources, [expected] * size, exact=False)

    def gathering(self, size: int, dtype: DType, counts: Sequence[int], seed: int = 0) -> Case:
        """Return an allgatherv to which rank r gives ``counts[r]`` elements."""
        sources = [oracle.values(dtype, count, rank, seed=seed) for rank, count in enumerate(counts)]
        expected = [oracle.allgatherv(sources)] * size
        return Case.of(f"allgatherv of {list(counts)} {dtype.label}", _allgatherv(counts), sources, expected)

    def broadcasting(self, size: int, dtype: DType, count: int, root: int, seed: int = 0) -> Case:
        """Return a broadcast from ``root``. Its source and target are the same memory."""
        sources = self.inputs(size, dtype, count, seed)
        label = f"broadcast of {count} {dtype.label} from {root}"
        return Case.of(label, _broadcast(root), sources, [sources[root]] * size, in_place=True)

    def scattering(self, size: int, dtype: DType, counts: Sequence[int], op: ReduceOp, seed: int = 0) -> Case:
        """Return a reducescatterv from which rank r gets ``counts[r]`` elements."""
        sources = self.inputs(size, dtype, sum(counts), seed)
        expected = [oracle.reducescatterv(sources, counts, op, rank, self.adding(size)) for rank in range(size)]
        label = f"reducescatterv {op.name.lower()} to {list(counts)} {dtype.label}"
        exact = self.capabilities().order_fixed
        return Case.of(label, _reducescatterv(counts, op), sources, expected, exact=exact)

    def moving_all(self, sources: Sequence[oracle.Array]) -> Case:
        """Return an allgatherv of these int32 sources."""
        counts = [len(source) for source in sources]
        expected = [oracle.allgatherv(sources)] * len(sources)
        return Case.of(f"allgatherv of {counts} int32", _allgatherv(counts), sources, expected)

    def exchanging(self, size: int, dtype: DType, counts: Sequence[Sequence[int]], seed: int = 0) -> Case:
        """Return an alltoallv in which ``counts[s][d]`` elements go from rank s to rank d."""
        sources = [oracle.values(dtype, sum(row), rank, seed=seed) for rank, row in enumerate(counts)]
        expected = [oracle.alltoallv(sources, counts, rank) for rank in range(size)]
        return Case.of(f"alltoallv of {counts} {dtype.label}", _alltoallv(counts), sources, expected)

    def bucket(self, size: int, plan: Plan, in_place: bool = False, seed: int = 0) -> Case:
        """Return a prepared allreduce of the plan's tensors, which lie one after the other in memory."""
        sources = self.inputs(size, plan.dtype, sum(plan.counts), seed)
        expected = [oracle.reduce(sources, plan.op, plan.prescale, plan.postscale, self.adding(size))] * size
        exact = self.capabilities().order_fixed and plan.prescale == plan.postscale == 1.0
        label = f"prepared {plan.op.name.lower()} of {list(plan.counts)} {plan.dtype.label}"
        return Case.of(label, _planned(plan), sources, expected, in_place=in_place, exact=exact)

    def around_chunks(self, dtype: DType) -> list[int]:
        """Return counts just below, at and above one chunk, and a count of several chunks and a part of one."""
        one = self.chunk_bytes // dtype.itemsize
        return [one - 1, one, one + 1, 4 * one + one // 2 + 3]

    def chunky(self, size: int, dtype: DType) -> list[int]:
        """Return a count for each rank, taken from ``around_chunks``. No two of four ranks have the same count."""
        large = self.around_chunks(dtype)[::-1]
        return [large[rank % 4] for rank in range(size)]

    def cases(self, size: int, capabilities: Capabilities) -> st.SearchStrategy[Case]:
        """Return a Hypothesis strategy that draws cases of the collectives, within the transport's ``capabilities``."""
        dtypes, ops = st.sampled_from(sorted(capabilities.dtypes)), st.sampled_from(sorted(capabilities.ops))
        count = st.one_of(st.integers(0, 40), st.integers(0, self.chunk_bytes // 4))
        counts = st.lists(count, min_size=size, max_size=size)
        matrices = st.lists(counts, min_size=size, max_size=size)
        moved, seed, this = st.sampled_from(DType), st.integers(0, 99), st.just(size)
        return st.one_of(
            st.builds(self.reducing, this, dtypes, ops, count, st.booleans(), seed),
            st.builds(self.gathering, this, moved, counts, seed),
            st.builds(self.broadcasting, this, moved, count, st.integers(0, size - 1), seed),
            st.builds(self.scattering, this, dtypes, counts, ops, seed),
            st.builds(self.exchanging, this, moved, matrices, seed),
        )
