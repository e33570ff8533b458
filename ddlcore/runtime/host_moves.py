"""Chooses the memory for the collectives that are no allreduces, and makes their outcomes, for tensors in host memory."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

from ddlcore.contracts.transport import Memory, Move
from ddlcore.messages.spec import Spec
from ddlcore.runtime.buffers import FusionBuffers
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.process_sets import Communicator
from ddlcore.runtime.request import Entry
from ddlcore.runtime.transport_calls import Unserved, new_memory
from ddlcore.types import Buffer, DType, Kind

Counts = Sequence[int] | Sequence[Sequence[int]]

_NOTHING = Buffer(0, 0, DType.U8, (0,))


class Movement(ABC):
    """The memory and the counts of one collective, from ``begin`` to ``end``. It may be used again for the next one.

    ``source``, ``target`` and ``counts`` are the arguments of PreparedMove.run. Only the thread that runs buckets uses
    this object.
    """

    words = 0  # how many integers each rank must tell the others before the collective

    def __init__(self, move: Move) -> None:
        self.move = move
        self.source = self.target = _NOTHING
        self.counts: Counts = ()

    @abstractmethod
    def begin(self, entry: Entry | None, told: Sequence[int]) -> None:
        """Choose the memory. ``told`` are the ``words`` integers of each rank, in the order of the ranks.

        ``entry`` is None if this rank takes part without a tensor, because it has joined.
        """

    @abstractmethod
    def end(self, entry: Entry | None) -> Outcome | None:
        """Return the outcome of ``entry``, after the collective has run. A repeated call has the same effect."""

    def forget(self) -> None:
        """Drop the memory of the last collective."""
        self.source = self.target = _NOTHING


def apart(source: Buffer, target: Buffer, buffers: FusionBuffers) -> Buffer:
    """Return ``source``, or a copy of it if it shares memory with ``target``, which not all transports allow."""
    begin, end = source.address, source.address + source.nbytes
    if end <= target.address or target.address + target.nbytes <= begin:
        return source
    copy = buffers.get("apart", source.count, source.dtype)
    ctypes.memmove(copy.address, begin, source.nbytes)
    return copy


def movement(kind: Kind, communicator: Communicator, spec: Spec) -> Movement:
    """Return the movement of an allgather, a broadcast or an alltoall of a tensor with ``spec``."""
    if kind is Kind.BROADCAST:
        return _Broadcast(communicator, spec)
    return (_Allgather if kind is Kind.ALLGATHER else _Alltoall)(communicator, spec)


class _Ragged(Movement):
    """A collective whose sizes differ between ranks and between calls."""

    def __init__(self, kind: Kind, communicator: Communicator, spec: Spec) -> None:
        super().__init__(Move(kind, spec.dtype))
        self._rank, self._buffers = communicator.rank, communicator.buffers
        self._row = prod(spec.shape)  # elements of one row
        self._rows: tuple[tuple[int, ...], ...] = ()
        self._told: Sequence[int] | None = None
        self._count = 0  # elements of the result

    def begin(self, entry: Entry | None, told: Sequence[int]) -> None:
        if told != self._told:  # mostly the sizes are those of the last call
            self._told = None
            self._rows = tuple(tuple(told[at : at + self.words]) for at in range(0, len(told), self.words))
            self.counts, self._count = self._counted()
            self._told = told
        given, dtype = entry.given if entry is not None else None, self.move.dtype
        source, target = (given.source, given.target) if given is not None else (new_memory(0, dtype), None)
        assert source is not None
        if target is not None and target.count == self._count:
            self.source, self.target = apart(source, target, self._buffers), target
        else:  # if the sizes differ, ``end`` raises the error, because other ranks wait for this one in the collective
            self.source, self.target = source, self._buffers.result(self._count, dtype)

    def end(self, entry: Entry | None) -> Outcome | None:
        given = entry.given.target if entry is not None else None
        if given is None:
            assert isinstance(self.target.owner, Memory)
            return Outcome(self.target.owner, self._rows)
        if self.target is not given:
            raise Unserved(
                f"{self.move.kind.name.lower()}: the result has {self._count} elements, and output has {given.count}; "
                "has a rank joined, or do other ranks send other numbers of rows?"
            )
        return Outcome(None, self._rows)

    @abstractmethod
    def _counted(self) -> tuple[Counts, int]:
        """Return the counts of elements for the transport, and how many elements this rank gets."""


class _Allgather(_Ragged):
    words = 1

    def __init__(self, communicator: Communicator, spec: Spec) -> None:
        super().__init__(Kind.ALLGATHER, communicator, spec)

    def _counted(self) -> tuple[Counts, int]:
        counts = tuple(rows[0] * self._row for rows in self._rows)
        return counts, sum(counts)


class _Alltoall(_Ragged):
    def __init__(self, communicator: Communicator, spec: Spec) -> None:
        super().__init__(Kind.ALLTOALL, communicator, spec)
        self.words = len(communicator.ranks)

    def _counted(self) -> tuple[Counts, int]:
        counts = tuple(tuple(rows * self._row for rows in sent) for sent in self._rows)  # [from][to]
        return counts, sum(sent[self._rank] for sent in counts)


class _Broadcast(Movement):
    def __init__(self, communicator: Communicator, spec: Spec) -> None:
        super().__init__(Move(Kind.BROADCAST, spec.dtype, root=communicator.ranks.index(spec.root)))
        self._count = prod(spec.shape)

    def begin(self, entry: Entry | None, told: Sequence[int]) -> None:
        if entry is None:
            self.source = self.target = new_memory(self._count, self.move.dtype)
            return
        given = entry.given
        assert given.source is not None and given.target is not None
        self.source, self.target = given.source, given.target

    def end(self, entry: Entry | None) -> Outcome | None:
        return None  # the result is in the caller's memory
