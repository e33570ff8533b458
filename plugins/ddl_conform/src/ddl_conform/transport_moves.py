"""Tests of prepared moves: the collectives other than allreduces, run repeatedly with other memory and other counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count as numbers
from threading import Thread

import pytest

from ddl_conform.group import Case
from ddl_conform.transport_base import only_where
from ddl_conform.transport_cases import TransportCases
from ddlcore.contracts.transport import DONE, Move, PreparedMove, Transport, Work
from ddlcore.types import Buffer, DType, Kind, ReduceOp

__all__ = ["TransportMoves"]

TYPE = DType.I32
KINDS = pytest.mark.parametrize(
    "kind", [Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER], ids=lambda kind: kind.name.lower()
)
Counts = Sequence[int] | Sequence[Sequence[int]]
Run = tuple[Case, Counts]


class _Once:
    """One prepared move on every rank, which is prepared at the first run on a rank.

    The ranks have different tickets for the same run, as in ddl.
    """

    def __init__(self, move: Move, size: int) -> None:
        self._move = move
        self._prepared: list[PreparedMove | None] = [None] * size
        self._tickets = [numbers(1 + rank, 1 + rank) for rank in range(size)]
        self.last = [0] * size

    def run(self, transport: Transport, source: Buffer, target: Buffer, counts: Counts, again: bool = False) -> Work:
        """Run the move on one rank, with the next ticket or ``again`` with the last one."""
        rank = transport.context.rank
        prepared = self._prepared[rank]
        if prepared is None:
            prepared = self._prepared[rank] = transport.prepare_move(self._move)
        if not again:
            self.last[rank] = next(self._tickets[rank])
        prepared.run(source, target, counts, self.last[rank])
        return DONE


class TransportMoves(TransportCases):
    """The tests of the results of prepared moves, and of their repetition."""

    @KINDS
    def test_a_prepared_move_gives_what_its_collective_gives(self, kind: Kind) -> None:
        """A prepared move returns the right values in every run.

        Some runs have the same counts as the run before, some have other counts, and in some runs all counts are 0. The
        runs of two prepared moves of the same kind alternate.
        """
        self.needs(TYPE)
        for size in self.sizes:
            cases = []
            moves = [_Once(self._move(kind, root), size) for root in (0, size - 1)]
            for seed, counts in enumerate(self._counts(kind, size)):
                for root, once in zip((0, size - 1), moves):
                    cases.append(self._prepared(kind, size, counts, root, once, seed)[0])
            self.check(size, cases)

    @only_where("resumable_moves")
    @KINDS
    def test_a_repeated_move_has_no_effect(self, kind: Kind) -> None:
        """A run with the ticket of the last run moves nothing, and waits for nobody. Any thread may call it.

        So a thread that continues the work of an interrupted thread does not disturb the other ranks.
        """
        if not self.capabilities().resumable_moves:
            pytest.skip("capabilities: moves cannot be repeated")
        self.needs(TYPE)
        for size in self.sizes:
            once = _Once(self._move(kind, 0), size)
            runs = [self._prepared(kind, size, c, 0, once, seed) for seed, c in enumerate(self._counts(kind, size))]

            def play(rank: int, transport: Transport, once: _Once = once, runs: list[Run] = runs) -> None:
                for number, (case, counts) in enumerate(runs):
                    case.run(rank, transport)
                    source, target = case.memory(rank)
                    kept = target.array.copy()
                    target.array[:] = 77
                    for _ in range((number + rank) % 3):  # a different number of repetitions on each rank
                        call = partial(once.run, transport, source.buffer, target.buffer, counts, again=True)
                        fault = _fault_on_another_thread(call, self.deadline_s / 4)
                        assert not fault, f"{case.label}: a repeated move {fault}"
                    assert (target.array == 77).all(), f"{case.label}: a repeated move has written to its target"
                    target.array[:] = kept

            self.play(size, play)
            for case, _ in runs:
                case.check()

    def _move(self, kind: Kind, root: int) -> Move:
        return Move(kind, TYPE, ReduceOp.Sum, root if kind is Kind.BROADCAST else 0)

    def _counts(self, kind: Kind, size: int) -> list[Counts]:
        """Return counts of elements for several runs: small ones twice, zeros, and those of several chunks."""
        one = self.chunk_bytes // TYPE.itemsize
        if kind is Kind.BROADCAST:
            return [(7,), (7,), (0,), (2 * one + 5,)]
        row = tuple(range(3, 3 + size))
        empty, large = (0,) * size, tuple(one + 3 * rank for rank in range(size))
        if kind is Kind.ALLTOALL:
            turned = [row[rank:] + row[:rank] for rank in range(size)]
            return [(row,) * size, (row,) * size, turned, (empty,) * size, (row,) * size, (large,) * size]
        return [row, row, list(row[::-1]), empty, row, large]

    def _prepared(self, kind: Kind, size: int, counts: Counts, root: int, once: _Once, seed: int) -> Run:
        """Return the case of one run of ``once`` with ``counts``, and the counts that this run passes."""
        given: Counts = counts
        if kind is Kind.ALLGATHER:
            case = self.gathering(size, TYPE, counts, seed)  # type: ignore[arg-type]  # these are its counts
        elif kind is Kind.ALLTOALL:
            case = self.exchanging(size, TYPE, counts, seed)  # type: ignore[arg-type]
        elif kind is Kind.REDUCESCATTER:
            case = self.scattering(size, TYPE, counts, ReduceOp.Sum, seed)  # type: ignore[arg-type]
        else:
            in_place = self.broadcasting(size, TYPE, counts[0], root, seed)  # type: ignore[arg-type]
            sources = [area.array for area in in_place.sources]
            case = Case.of(f"{in_place.label}, to other memory", in_place.call, sources, in_place.expected)
            given = ()
        label = f"prepared {case.label}, run {seed}"
        return replace(case, label=label, call=lambda transport, s, t: once.run(transport, s, t, given)), given


def _fault_on_another_thread(call: Callable[[], object], deadline_s: float) -> str:
    """Make ``call`` on another thread. Return what is wrong with it; "" if it has ended within ``deadline_s`` seconds."""
    faults = ["waits for other ranks"]

    def run() -> None:
        try:
            call()
            faults.clear()
        except Exception as error:
            faults[:] = [f"raises {error!r}"]

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return "".join(faults)
