"""Decides by a vote of all ranks whether a bucket of a schedule is run. No data is moved before the vote is complete.

A rank with real data votes for the bucket, and a rank that takes part with dummy data votes against it. With its vote,
each rank tells the other ranks some integers, such as the numbers of rows of its tensor. If the vote is unanimous, every
rank knows that all ranks are in the bucket with real data. Otherwise the bucket is void on all ranks.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ddlcore.contracts.transport import Plan
from ddlcore.errors import TransportError
from ddlcore.runtime.process_sets import Communicator
from ddlcore.runtime.transport_calls import finish
from ddlcore.types import Buffer, DType, Kind, ReduceOp


class Vote(ABC):
    """The votes on one bucket of a schedule. Only the thread that runs buckets uses this object.

    ``atomic`` says that the transport itself notices ranks with dummy data. ``resumable`` says that ``try_cast`` may be
    called.
    """

    atomic = False
    resumable = False

    @abstractmethod
    def cast(self, mine: Sequence[int], real: bool) -> bool:
        """Vote, and wait until all ranks have voted. Return True if all of them have real data, otherwise False.

        ``real`` says whether this rank has real data. If it has, ``mine`` are the integers that it tells.
        """

    def try_cast(self, mine: Sequence[int], ticket: int) -> bool | None:
        """Try to do the same as ``cast`` with real data. Return None if a rank is missing after about 0.1 s.

        See Prepared.try_run_atomic for ``ticket`` and for repeated calls.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be cast in several tries")

    @abstractmethod
    def told(self) -> list[int]:
        """Return the integers of all ranks, in the order of the ranks, after a unanimous vote.

        Raises TransportError if the transport has not delivered what this rank has told, or a negative number.
        """


def vote_of(communicator: Communicator, words: int) -> Vote:
    """Return a new object for votes of the ranks of ``communicator``. Each rank tells ``words`` integers."""
    if len(communicator.ranks) == 1:
        return _Alone()
    if communicator.transport.capabilities_for(Kind.ALLREDUCE).atomic:
        return _Atomic(communicator, words)
    return _Gathering(communicator, words)


class _Alone(Vote):
    """The vote of a process set of one rank."""

    atomic = resumable = True

    def cast(self, mine: Sequence[int], real: bool) -> bool:
        self._mine = mine
        return real

    def try_cast(self, mine: Sequence[int], ticket: int) -> bool | None:
        self._mine = mine
        return True

    def told(self) -> list[int]:
        return list(self._mine)


class _Atomic(Vote):
    """A vote by an atomic allreduce. It adds tables in which each rank has written only its own row."""

    atomic = True

    def __init__(self, communicator: Communicator, words: int) -> None:
        transport, size = communicator.transport, len(communicator.ranks)
        self.resumable = transport.capabilities_for(Kind.ALLREDUCE).resumable
        self._own = slice(communicator.rank * words, (communicator.rank + 1) * words)
        # Without words, an allreduce of one byte of no meaning is enough.
        self._sent = (ctypes.c_int64 * (size * words or 1))()
        self._table = (ctypes.c_int64 * (size * words or 1))()
        plan = Plan((size * words,), DType.I64, ReduceOp.Sum) if words else Plan((1,), DType.U8, ReduceOp.Max)
        self._prepared = transport.prepare(plan)
        self._sources, self._targets = [ctypes.addressof(self._sent)], [ctypes.addressof(self._table)]
        self._mine: list[int] = self._sent[self._own]

    def cast(self, mine: Sequence[int], real: bool) -> bool:
        if not real:
            return self._prepared.run_atomic((), (), False)
        if mine:
            self._write(mine)
        return self._prepared.run_atomic(self._sources, self._targets, True)

    def try_cast(self, mine: Sequence[int], ticket: int) -> bool | None:
        if mine:
            self._write(mine)
        return self._prepared.try_run_atomic(self._sources, self._targets, ticket)

    def _write(self, mine: Sequence[int]) -> None:
        if self._mine != list(mine):  # mostly the same as in the last vote
            self._mine = []
            self._sent[self._own] = mine  # type: ignore[call-overload]  # any sequence works
            self._mine = list(mine)

    def told(self) -> list[int]:
        told = self._table[:]
        return _checked(told, told[self._own], self._mine)


class _Gathering(Vote):
    """A vote by an ordinary collective. Each rank also tells whether it has real data."""

    def __init__(self, communicator: Communicator, words: int) -> None:
        self._transport, self._rank = communicator.transport, communicator.rank
        self._columns, self._counts = 1 + words, (1 + words,) * len(communicator.ranks)
        # Without words, a reduction of one byte takes fewer steps on many ranks than an allgather.
        number, dtype = (ctypes.c_int64, DType.I64) if words else (ctypes.c_uint8, DType.U8)
        self._sent, self._table = (number * self._columns)(), (number * sum(self._counts))()
        self._source, self._target = _buffer(self._sent, dtype), _buffer(self._table, dtype)

    def cast(self, mine: Sequence[int], real: bool) -> bool:
        if self._columns == 1:
            self._sent[0] = not real
            one = Buffer(self._target.address, 1, DType.U8, (1,), owner=self._table)
            finish(self._transport.allreduce(self._source, one, ReduceOp.Max))
            return not self._table[0]
        self._sent[:] = [real, *(mine if real else (0,) * (self._columns - 1))]
        finish(self._transport.allgatherv(self._source, self._target, self._counts))
        return all(self._table[:: self._columns])

    def told(self) -> list[int]:
        rows = [self._table[at : at + self._columns] for at in range(0, len(self._table), self._columns)]
        return _checked([number for row in rows for number in row[1:]], rows[self._rank][1:], self._sent[1:])


def _buffer(array: Any, dtype: DType) -> Buffer:
    return Buffer(ctypes.addressof(array), len(array), dtype, (len(array),), owner=array)


def _checked(told: list[int], own: list[int], sent: list[int]) -> list[int]:
    """Return ``told``. Ranks read and write as much memory as these numbers say, so the numbers are checked first.

    ``own`` are this rank's own numbers among them, and ``sent`` the numbers that this rank has sent.
    """
    if own != sent or (told and min(told) < 0):
        raise TransportError(f"the transport delivered wrong sizes: {told} where this rank announced {sent}")
    return told
