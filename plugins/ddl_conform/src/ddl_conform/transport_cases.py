"""Makes the cases of the transport tests. A case is a collective with the inputs and the right results of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ddl_conform import oracle
from ddl_conform.group import Call, Case
from ddl_conform.transport_base import TransportBase
from ddlcore.contracts.transport import Capabilities, Plan, Transport, Work
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
    """Return the address of each tensor of ``plan``.

    The tensors are one after the other, without gaps, in ``buffer``.
    """
    return [buffer.address + sum(plan.counts[:i]) * plan.dtype.itemsize for i in range(len(plan.counts))]


def _planned(plan: Plan) -> Call:
    def call(transport: Transport, source: Buffer, target: Buffer) -> Work:
        return transport.prepare(plan).start(addresses(plan, source), addresses(plan, target))

    return call


class TransportCases(TransportBase):
    """The methods that make the cases of the transport tests, one method for each collective.

    These arguments are common to several methods. ``size`` is the number of ranks, ``count`` is a number of elements,
    ``counts`` are numbers of elements by rank, and different values of ``seed`` give different inputs.
    """

    def inputs(self, size: int, dtype: DType, count: int, seed: int = 0) -> list[oracle.Array]:
        """Return an array of ``count`` random values of the type ``dtype`` for each rank."""
        return [oracle.values(dtype, count, rank, seed=seed) for rank in range(size)]

    def summing(self, label: str, sources: Sequence[oracle.Array], expected: oracle.Array) -> Case:
        """Return the case of an allreduce of ``sources``, the array of each rank, with the op Sum.

        ``expected`` is the right result. Either the sum does not depend on the order of addition, or ``expected`` was
        added in the same order as in the transport. ``label`` names the case in messages.
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
        """Return the case of an allreduce of ``count`` random elements.

        If ``in_place`` is true, the results are written to the sources. The sources begin ``offsets[0]`` elements after
        the beginning of a cache line, and the targets ``offsets[1]`` elements.
        """
        sources = self.inputs(size, dtype, count, seed)
        expected = [oracle.reduce(sources, op, hosts=self.adding(size))] * size
        label = f"allreduce {op.name.lower()} of {count} {dtype.label}"
        exact = self.capabilities().order_fixed
        return Case.of(label, _allreduce(op), sources, expected, in_place=in_place, exact=exact, offsets=offsets)

    def choosing(self, size: int, dtype: DType, op: ReduceOp, count: int) -> Case:
        """Return the case of an allreduce with Min or Max, in which each rank has a NaN at a different position."""
        sources = self.inputs(size, dtype, count)
        for rank, source in enumerate(sources):
            source[rank] = float("nan")
        expected = oracle.reduce(sources, op)
        expected[:size] = float("nan")
        label = f"allreduce {op.name.lower()} of {count} {dtype.label}, of which {size} are no numbers"
        return Case.of(label, _allreduce(op), sources, [expected] * size, exact=False)

    def gathering(self, size: int, dtype: DType, counts: Sequence[int], seed: int = 0) -> Case:
        """Return the case of an allgatherv in which rank r contributes ``counts[r]`` elements."""
        sources = [oracle.values(dtype, count, rank, seed=seed) for rank, count in enumerate(counts)]
        expected = [oracle.allgatherv(sources)] * size
        return Case.of(f"allgatherv of {list(counts)} {dtype.label}", _allgatherv(counts), sources, expected)

    def broadcasting(self, size: int, dtype: DType, count: int, root: int, seed: int = 0) -> Case:
        """Return the case of a broadcast from the rank ``root``. Source and target of a rank are the same memory."""
        sources = self.inputs(size, dtype, count, seed)
        label = f"broadcast of {count} {dtype.label} from {root}"
        return Case.of(label, _broadcast(root), sources, [sources[root]] * size, in_place=True)

    def scattering(self, size: int, dtype: DType, counts: Sequence[int], op: ReduceOp, seed: int = 0) -> Case:
        """Return the case of a reducescatterv in which rank r gets ``counts[r]`` elements of the result."""
        sources = self.inputs(size, dtype, sum(counts), seed)
        expected = [oracle.reducescatterv(sources, counts, op, rank, self.adding(size)) for rank in range(size)]
        label = f"reducescatterv {op.name.lower()} to {list(counts)} {dtype.label}"
        exact = self.capabilities().order_fixed
        return Case.of(label, _reducescatterv(counts, op), sources, expected, exact=exact)

    def moving_all(self, sources: Sequence[oracle.Array]) -> Case:
        """Return the case of an allgatherv of ``sources``, the array of each rank, which has the type int32."""
        counts = [len(source) for source in sources]
        expected = [oracle.allgatherv(sources)] * len(sources)
        return Case.of(f"allgatherv of {counts} int32", _allgatherv(counts), sources, expected)

    def exchanging(self, size: int, dtype: DType, counts: Sequence[Sequence[int]], seed: int = 0) -> Case:
        """Return the case of an alltoallv in which rank s sends ``counts[s][d]`` elements to rank d."""
        sources = [oracle.values(dtype, sum(row), rank, seed=seed) for rank, row in enumerate(counts)]
        expected = [oracle.alltoallv(sources, counts, rank) for rank in range(size)]
        return Case.of(f"alltoallv of {counts} {dtype.label}", _alltoallv(counts), sources, expected)

    def bucket(self, size: int, plan: Plan, in_place: bool = False, seed: int = 0) -> Case:
        """Return the case of a prepared allreduce of all tensors of ``plan``.

        The tensors are one after the other in memory. If ``in_place`` is true, the results are written to the sources.
        """
        sources = self.inputs(size, plan.dtype, sum(plan.counts), seed)
        expected = [oracle.reduce(sources, plan.op, plan.prescale, plan.postscale, self.adding(size))] * size
        exact = self.capabilities().order_fixed and plan.prescale == plan.postscale == 1.0
        label = f"prepared {plan.op.name.lower()} of {list(plan.counts)} {plan.dtype.label}"
        return Case.of(label, _planned(plan), sources, expected, in_place=in_place, exact=exact)

    def around_chunks(self, dtype: DType) -> list[int]:
        """Return four numbers of elements: one chunk less 1, one chunk, one chunk plus 1, and about 4.5 chunks.

        A chunk is the size (``chunk_bytes``) at which the transport cuts large tensors.
        """
        one = self.chunk_bytes // dtype.itemsize
        return [one - 1, one, one + 1, 4 * one + one // 2 + 3]

    def chunky(self, size: int, dtype: DType) -> list[int]:
        """Return a number of elements for each rank, from ``around_chunks``.

        The numbers of the first four ranks all differ.
        """
        large = self.around_chunks(dtype)[::-1]
        return [large[rank % 4] for rank in range(size)]

    def cases(self, size: int, capabilities: Capabilities) -> st.SearchStrategy[Case]:
        """Return a Hypothesis strategy that draws random cases of all collectives.

        The cases use only types and ops that are in the transport's ``capabilities``.
        """
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
