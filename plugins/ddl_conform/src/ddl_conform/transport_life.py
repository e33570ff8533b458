"""Tests that a transport opens, ends pending calls when it is aborted, closes, and leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import pytest

from ddl_conform import oracle
from ddl_conform.group import Area, Case, TransportGroup, finish
from ddl_conform.process_rank import belongings
from ddl_conform.transport_base import only_where
from ddl_conform.transport_cases import TransportCases
from ddlcore.contracts.transport import Plan, Transport
from ddlcore.errors import DeadlineExceeded, TransportError
from ddlcore.types import Buffer, DType, ReduceOp

__all__ = ["TransportLife"]

OPENING_S = 0.3  # for ``open`` to have begun to wait for the other ranks
READY_S = 40.0  # for all ranks to have allocated their memory, on a busy machine
ENDING_S = 4.0  # for native threads to end: the kernel may still list a thread that was joined
RETURN_S = 15.0  # for a call that waits for no peer, on a busy machine; less than the deadline of a whole test
COUNT = 300_000  # float32 elements: more than a ring of chunks holds


Pending = Callable[[], None]  # makes a call on memory that is already allocated, and waits until the call is complete


def _ones() -> Area:
    return Area(oracle.values(DType.F32, COUNT, 0))


def _allreduce(transport: Transport, size: int) -> Pending:
    area = _ones()
    return lambda: finish(transport.allreduce(area.buffer, area.buffer, ReduceOp.Sum))


def _allgatherv(transport: Transport, size: int) -> Pending:
    source, target = _ones(), Area(oracle.values(DType.F32, COUNT * size, 0))
    return lambda: finish(transport.allgatherv(source.buffer, target.buffer, [COUNT] * size))


def _broadcast(transport: Transport, size: int) -> Pending:
    area = _ones()
    return lambda: finish(transport.broadcast(area.buffer, 0))


def _reducescatterv(transport: Transport, size: int) -> Pending:
    source, target = Area(oracle.values(DType.F32, COUNT * size, 0)), _ones()
    return lambda: finish(transport.reducescatterv(source.buffer, target.buffer, [COUNT] * size, ReduceOp.Sum))


def _alltoallv(transport: Transport, size: int) -> Pending:
    source, target = (Area(oracle.values(DType.F32, COUNT * size, 0)) for _ in range(2))
    return lambda: finish(transport.alltoallv(source.buffer, target.buffer, [[COUNT] * size] * size))


def _barrier(transport: Transport, size: int) -> Pending:
    return lambda: finish(transport.barrier())


@only_where("vectored")
def _prepared(transport: Transport, size: int) -> Pending:
    area = _ones()
    prepared = transport.prepare(Plan((COUNT,), DType.F32, ReduceOp.Sum))
    return lambda: finish(prepared.start([area.buffer.address], [area.buffer.address]))


CALLS = pytest.mark.parametrize(
    "call",
    [_allreduce, _allgatherv, _broadcast, _reducescatterv, _alltoallv, _barrier, _prepared],
    ids=lambda call: call.__name__.strip("_"),
)


def _with_gaps(case: Case, rank: int) -> list[tuple[Buffer, Buffer]]:
    """Return pairs (source, target) for ``rank`` in which one of the two buffers has gaps.

    If the case runs in place, return one pair: source and target are the same memory, and both have gaps.
    """
    source, target = (area.buffer for area in case.memory(rank))
    if case.targets is None:
        return [(_spread(source), _spread(target))]
    return [(_spread(source), target), (source, _spread(target))]


def _spread(buffer: Buffer) -> Buffer:
    """Return a description of ``buffer`` with gaps: same address and count, but a stride of two elements."""
    return replace(buffer, strides=(2,))


class TransportLife(TransportCases):
    """The tests of opening, aborting and closing a transport, also when other ranks are missing."""

    def sum_of(self, group: TransportGroup, count: int = 1000) -> None:
        """Run one allreduce of ``count`` elements on all ranks of the open ``group``, and check the results."""
        sources = [oracle.values(DType.I32, count, rank) for rank in range(group.size)]
        expected = [oracle.reduce(sources, ReduceOp.Sum)] * group.size
        call = lambda transport, source, target: transport.allreduce(source, target, ReduceOp.Sum)  # noqa: E731
        case = Case.of("allreduce", call, sources, expected)
        group.run(case.run)
        case.check()

    def test_close_waits_for_nobody(self) -> None:
        """``close`` does not wait for other ranks. The ranks can close one after the other.

        Each rank can call ``close`` twice.
        """
        for size in self.sizes:
            group = self.new_group(size)
            group.open()
            self.sum_of(group)
            closed = [threading.Event() for _ in range(size)]

            def close(rank: int, transport: Transport, closed: list[threading.Event] = closed) -> None:
                if rank:
                    assert closed[rank - 1].wait(RETURN_S), (
                        f"close on rank {rank - 1} did not return within {RETURN_S:g} s"
                    )
                transport.close()
                transport.close()
                closed[rank].set()

            group.run(close)
            group.close()

    def test_two_groups_live_side_by_side(self) -> None:
        """Calls in two open communicators can alternate, and to close one communicator does not affect the other."""
        for size in self.sizes:
            first, second = self.new_group(size, "first"), self.new_group(size, "second")
            first.open()
            second.open()
            for count in (10, 100_000):
                self.sum_of(first, count)
                self.sum_of(second, count)
            first.close()
            self.sum_of(second)
            second.close()

    def test_open_without_a_peer_ends_at_its_deadline(self) -> None:
        """If the other ranks do not call ``open``, ``open`` raises DeadlineExceeded after its timeout.

        After this error, the rank can call ``close``.
        """
        group = self.new_group(self.several())
        wait_s = 0.3
        late_s = []

        def alone(rank: int, transport: Transport) -> None:
            if rank:
                return
            begin_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                transport.open(replace(group.context(0), timeout_s=wait_s))
            late_s.append(time.monotonic() - begin_s - wait_s)
            transport.close()

        try:
            group.run(alone)
        finally:
            group.ranks.close()
        assert late_s[0] < 10.0, f"open ended {late_s[0]:.1f} s after its deadline"

    def test_a_wait_keeps_its_deadline(self) -> None:
        """``Work.wait`` returns False after its timeout, and True only if all ranks have made their call."""
        size = self.several()
        come = threading.Event()
        waiting, waited = ([threading.Event() for _ in range(size)] for _ in range(2))

        def play(rank: int, transport: Transport) -> None:
            if rank == size - 1:
                time.sleep(0.15)  # ranks that have not begun by then, or block in the call itself, are not judged
                within = [other for other in range(rank) if waiting[other].is_set()]
                until_s = time.monotonic() + RETURN_S
                late = [other for other in within if not waited[other].wait(max(0.0, until_s - time.monotonic()))]
                come.set()
            area = Area(oracle.values(DType.F32, 1000, rank))
            work = transport.allreduce(area.buffer, area.buffer, ReduceOp.Sum)
            waiting[rank].set()
            complete = work.wait(0.01)
            waited[rank].set()
            assert come.is_set() or not complete, "complete before the last rank had called"
            finish(work)
            assert come.is_set(), "complete before the last rank had called"
            if rank == size - 1:
                assert not late, f"wait(0.01) had not returned after {RETURN_S:g} s on ranks {late}"

        self.play(size, play)

    @only_where("abort")
    @CALLS
    def test_abort_ends_a_pending_call(self, call: Callable[[Transport, int], Pending]) -> None:
        """If a rank waits in a call of a collective, ``abort`` from another thread makes the call raise TransportError.

        The call ends soon, even if no other rank calls ``abort``.
        """
        size = self.several()
        if call is _prepared:
            self.needs_vectored(DType.F32)
        group = self._abortable(size)
        ready, ended = ([threading.Event() for _ in range(size)] for _ in range(2))
        over = threading.Event()

        def play(rank: int, transport: Transport) -> None:
            if rank == 0:
                over.wait(self.deadline_s)  # rank 0 makes no call, so the other ranks wait for it
                return
            try:
                pending = call(transport, size)  # allocates megabytes, which must not count as the transport's time
                ready[rank].set()
                with pytest.raises(TransportError):
                    pending()
            finally:
                ready[rank].set()
                ended[rank].set()

        late: list[str] = []

        def abort() -> None:
            # The pending calls need real peers that have arrived: an abort before all memory is allocated would test a
            # busy machine, not the transport.
            until_s = time.monotonic() + READY_S
            for rank in range(1, size):
                ready[rank].wait(max(0.0, until_s - time.monotonic()))
            time.sleep(0.05)  # the calls begin meanwhile; a call that begins after its abort must end as well
            self._abort_in_turn(group, range(size - 1, 0, -1), ended, "call", late)
            over.set()

        self._run_with(group, play, abort, late)

    @only_where("abort")
    @pytest.mark.parametrize("absent", ["first", "last"])
    def test_abort_ends_a_pending_open(self, absent: str) -> None:
        """If a rank waits in ``open``, ``abort`` from another thread makes ``open`` raise TransportError soon.

        In the test, one rank never calls ``open``. After ``abort``, the other ranks can call ``close``. In a composed
        transport, a rank may not need the missing rank. Such a rank may have returned from ``open`` before ``abort``.
        """
        size = self.several()
        group = self._abortable(size, opened=False)
        missing = 0 if absent == "first" else size - 1
        there = [rank for rank in range(size) if rank != missing]
        began, ended = ([threading.Event() for _ in range(size)] for _ in range(2))
        raised: list[int] = []

        def play(rank: int, transport: Transport) -> None:
            if rank == missing:
                return
            began[rank].set()
            try:
                transport.open(group.context(rank))
            except TransportError:
                raised.append(rank)
            finally:
                ended[rank].set()
            transport.close()

        late: list[str] = []

        def abort() -> None:
            for rank in there:
                began[rank].wait(READY_S)
            time.sleep(OPENING_S)
            self._abort_in_turn(group, there, ended, "open", late)

        self._run_with(group, play, abort, late)
        assert raised, f"open returned on all ranks, although rank {missing} of {size} never opened"

    @only_where("abort")
    def test_a_new_group_works_after_abort(self) -> None:
        """After ``abort`` and ``close``, the same ranks can open new transports and run an allreduce."""
        for size in self.sizes:
            group = self._abortable(size)
            self.sum_of(group)
            group.abort()
            group.close()
            again = self.new_group(size)
            again.open()
            self.sum_of(again)
            again.close()

    def test_memory_with_gaps_is_refused(self) -> None:
        """A collective refuses a buffer with gaps by a ValueError on this rank, before any data is sent.

        A dense buffer is accepted, also if it is not row-major.
        """
        self.needs(DType.F32)
        for size in self.sizes:
            dense = [self.reducing(size, DType.F32, ReduceOp.Sum, 6), self.broadcasting(size, DType.F32, 6, 0)]
            cases = [*dense, *self.row_major(size)]
            taken: list[str] = []

            def play(rank: int, transport: Transport, cases: list[Case] = cases, taken: list[str] = taken) -> None:
                for case in cases:
                    for source, target in _with_gaps(case, rank):
                        try:
                            finish(case.call(transport, source, target))
                        except ValueError:
                            continue
                        taken.append(f"{case.label}: rank {rank} took memory with gaps")

            self.play(size, play)
            assert not taken, taken[0]
            for area in chain.from_iterable((*case.sources, *(case.targets or ())) for case in dense):
                area.buffer.shape, area.buffer.strides = (2, 3), (1, 2)
            self.check(size, cases)

    def row_major(self, size: int) -> list[Case]:
        """Return one case for each collective that divides tensors by rows."""
        return [
            self.gathering(size, DType.F32, [6] * size),
            self.scattering(size, DType.F32, [6] * size, ReduceOp.Sum),
            self.exchanging(size, DType.F32, [[6] * size] * size),
        ]

    def several(self) -> int:
        """Return the size of the suite's largest world.

        If this size is 1, skip the test, because no rank ever waits for another rank.
        """
        if max(self.sizes) < 2:
            pytest.skip("serves only worlds of one: no rank is ever waited for")
        return max(self.sizes)

    def _abort_in_turn(
        self, group: TransportGroup, ranks: Iterable[int], ended: Sequence[threading.Event], what: str, late: list[str]
    ) -> None:
        """Abort the transports of ``ranks`` one after the other, and add a line to ``late`` for each one that hangs.

        ``what`` is the word for the pending operation in these lines: "call" or "open". The rank's thread sets
        ``ended[rank]`` when the pending operation has ended.
        """
        # The pending operation of each rank must end before the next rank is aborted. So the test fails if the abort
        # of a rank works only together with the aborts of other ranks.
        for rank in ranks:
            aborting = threading.Thread(target=group.transports[rank].abort, name="abort", daemon=True)
            aborting.start()
            aborting.join(self.abort_s)
            if aborting.is_alive():
                late.append(f"abort did not return on rank {rank} within {self.abort_s:g} s")
            if not ended[rank].wait(self.abort_s):
                late.append(f"rank {rank}'s {what} went on {self.abort_s:g} s after its abort")

    def _run_with(
        self, group: TransportGroup, play: Callable[[int, Transport], None], abort: Callable[[], None], late: list[str]
    ) -> None:
        """Call ``play`` on every rank, and at the same time ``abort`` on another thread. Then discard the group.

        Raises AssertionError with the lines in ``late`` if ``abort`` has added any. Otherwise raises the error of the
        ranks, if there is one.
        """
        thread = threading.Thread(target=abort, name="abort", daemon=True)
        thread.start()
        hung: AssertionError | None = None
        try:
            group.run(play)
        except AssertionError as error:
            hung = error
        finally:
            thread.join()  # ends, because each of its waits has a timeout
            group.discard()
        assert not late, "; ".join(late)  # says more than the error that the ranks did not end
        if hung is not None:
            raise hung

    def _abortable(self, size: int, opened: bool = True) -> TransportGroup:
        """Return a new group of ``size`` ranks. The group is open if ``opened`` is true.

        If pending calls of the transport cannot be aborted, skip the test.
        """
        group = self.new_group(size)
        if not group.transports[0].capabilities.abort:
            group.ranks.close()
            pytest.skip("capabilities: abort is none, the job exits past a pending call")
        if opened:
            group.open()
        return group

    def test_nothing_stays(self) -> None:
        """After ``open``, an allreduce and ``close``, no thread, file descriptor or shared memory is left behind.

        The test repeats this sequence several times.
        """
        self._open_and_close()  # allocates what is made once for the process, such as a pool
        before = self.belongings()
        for _ in range(3):
            self._open_and_close()
        deadline_s = time.monotonic() + ENDING_S
        while (left := self._beyond(before)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not left, f"left behind after close: {left}"

    def _beyond(self, before: dict[str, set[str]]) -> dict[str, list[str]]:
        held = self.belongings()
        return {kind: sorted(held[kind] - had) for kind, had in before.items() if len(held[kind]) > len(had)}

    def belongings(self) -> dict[str, set[str]]:
        """Return the names of the threads, file descriptors and shared memory of the ranks' process, by kind."""
        return belongings()

    def _open_and_close(self) -> None:
        for size in self.sizes:
            group = self.new_group(size)
            group.open()
            self.sum_of(group, COUNT)
            group.close()
