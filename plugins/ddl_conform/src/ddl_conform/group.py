"""Runs collectives of one communicator, whose ranks are threads of this process, and checks the results.

Guard bytes before and after each tensor show whether a transport writes outside the tensor's memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ddl_conform.oracle import Array, difference
from ddl_conform.ranks import Ranks
from ddl_conform.store import ThreadStore
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.store import PrefixStore
from ddlcore.contracts.transport import Context, Transport, Work
from ddlcore.types import Buffer, DType, Member

__all__ = ["Area", "Case", "TransportGroup", "finish"]

T = TypeVar("T")
Call = Callable[[Transport, Buffer, Buffer], Work]

GUARD_BYTES = 256
GUARD_VALUE = 0xA5
ABORT_S = 10.0  # the contract allows 1 s; a busy machine needs more


class Area:
    """A copy of an array, with guard bytes before and after it in memory.

    The copy begins ``offset`` elements after the beginning of a cache line. ``buffer`` describes its memory.
    """

    def __init__(self, array: Array, offset: int = 0) -> None:
        array = np.ascontiguousarray(array).reshape(-1)
        self._raw = np.full(array.nbytes + 2 * GUARD_BYTES + 64 + offset * array.itemsize, GUARD_VALUE, np.uint8)
        self._begin = GUARD_BYTES + -self._raw.ctypes.data % 64 + offset * array.itemsize
        self._end = self._begin + array.nbytes
        self.array: Array = self._raw[self._begin : self._end].view(array.dtype)
        self.array[:] = array
        address = self._raw.ctypes.data + self._begin
        self.buffer = Buffer(address, array.size, DType.of(array.dtype.name), (array.size,), owner=self._raw)

    def damage(self) -> str:
        """Return a text that says whether guard bytes before or behind the memory were overwritten; "" if none were."""
        for name, guard in (("before", self._raw[: self._begin]), ("behind", self._raw[self._end :])):
            if (guard != GUARD_VALUE).any():
                return f"bytes {name} the memory were written over"
        return ""


@dataclass(repr=False)
class Case:
    """One collective with the inputs and the expected results of every rank.

    ``call`` starts the collective on one rank. ``sources`` and ``targets`` are the memory of each rank; if ``targets``
    is None, the collective writes its results into the sources.
    """

    label: str
    call: Call
    sources: Sequence[Area]
    expected: Sequence[Array]
    targets: Sequence[Area] | None = None
    terms: int = 1  # how many values are added into one element
    exact: bool = True
    before: list[Array] = field(default_factory=list)  # copies of the sources, to see whether they were changed

    @classmethod
    def of(
        cls,
        label: str,
        call: Call,
        sources: Sequence[Array],
        expected: Sequence[Array],
        *,
        in_place: bool = False,
        exact: bool = True,
        offsets: tuple[int, int] = (0, 0),
    ) -> Case:
        """Return a case whose inputs are copies of the arrays ``sources``, one array for each rank.

        Unless ``in_place`` is true, each rank also gets a target, which is filled with garbage. The sources begin
        ``offsets[0]`` elements after the beginning of a cache line, and the targets ``offsets[1]`` elements.
        """
        areas = [Area(source, offsets[0]) for source in sources]
        garbage = [np.frombuffer(b"\x5b" * e.nbytes, np.uint8).view(e.dtype) for e in expected]
        targets = None if in_place else [Area(array, offsets[1]) for array in garbage]
        where = f"{label}, in place" if in_place else label
        return cls(where, call, areas, expected, targets, len(sources), exact, [area.array.copy() for area in areas])

    def __repr__(self) -> str:
        return f"<{self.label}>"

    def memory(self, rank: int) -> tuple[Area, Area]:
        """Return the source and the target of ``rank``. If the case runs in place, both are the same area."""
        return self.sources[rank], (self.targets or self.sources)[rank]

    def run(self, rank: int, transport: Transport) -> None:
        """Run the collective on ``rank`` by ``transport``, and wait until it is complete on this rank."""
        source, target = self.memory(rank)
        finish(self.call(transport, source.buffer, target.buffer))

    def check(self) -> None:
        """Raise AssertionError if a result is wrong, a source was changed, or guard bytes were overwritten.

        The message names the case, the rank and the element.
        """
        for rank, expected in enumerate(self.expected):
            source, target = self.memory(rank)
            faults = [difference(target.array, expected, terms=self.terms, exact=self.exact), target.damage()]
            if self.targets is not None:
                changed = difference(source.array, self.before[rank])
                faults += [f"the source was changed: {changed}" if changed else "", source.damage()]
            text = "; ".join(fault for fault in faults if fault)
            assert not text, f"{self.label}: rank {rank} of {len(self.expected)}: {text}"


class TransportGroup:
    """The transports of all ranks of one communicator. Each transport is used by a thread of its own."""

    def __init__(
        self,
        transports: Sequence[Transport],
        kernels: Kernels,
        *,
        members: Sequence[Member],
        settings: Mapping[str, str | int | float | bool],
        deadline_s: float,
        name: str = "test",
    ) -> None:
        self.size = len(transports)
        self.transports = transports
        self.deadline_s = deadline_s
        self.ranks = Ranks(self.size, name)
        self.stores = ThreadStore()
        self._hangs = False  # the abort of some rank did not return
        self._contexts = [
            Context(rank, tuple(members), PrefixStore(f"{name}/", self.stores), kernels, settings, deadline_s, name)
            for rank in range(self.size)
        ]

    def open(self) -> None:
        """Open the transport of every rank. If one cannot be opened, close all transports and raise the error."""
        try:
            self.run(lambda rank, transport: transport.open(self._contexts[rank]))
        except BaseException:
            self.discard()
            raise

    def context(self, rank: int) -> Context:
        """Return the context with which ``rank`` opens its transport."""
        return self._contexts[rank]

    def run(self, function: Callable[[int, Transport], T], deadline_s: float | None = None) -> list[T]:
        """Call ``function(rank, transport)`` on every rank, and return the results in the order of the ranks.

        If the calls do not end within ``deadline_s`` seconds, abort all transports. If ``deadline_s`` is None, the
        deadline of the group is used. ``Ranks.run`` describes the errors that are raised.
        """
        return self.ranks.run(
            lambda rank: function(rank, self.transports[rank]), deadline_s or self.deadline_s, self.abort
        )

    def abort(self) -> None:
        """Call ``abort`` of every rank's transport, each from a thread of its own.

        Raises AssertionError if a call of ``abort`` does not return within 10 s. If a call raises an error, the first
        such error is raised here.
        """
        assert not self._hangs, "an earlier abort did not return"
        # Each abort has its own thread, because abort must work while the rank's thread is blocked inside a collective.
        # Also, if one abort hangs, the aborts of the other ranks must still be called, to release those ranks.
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=_call, args=(transport.abort, errors), name=f"abort-{rank}", daemon=True)
            for rank, transport in enumerate(self.transports)
            if transport.capabilities.abort
        ]
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + ABORT_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        hanging = [thread.name for thread in threads if thread.is_alive()]
        self._hangs = bool(hanging)
        assert not hanging, f"{', '.join(hanging)} did not return within {ABORT_S:g} s"
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Close the transport of every rank, and end the threads of the ranks.

        The transports are closed at the same time. If a rank hangs in an earlier call, no transport is closed.
        """
        if not self.ranks.stuck:
            self.run(lambda rank, transport: transport.close())
        self.ranks.close()

    def discard(self) -> None:
        """Abort and close the group after a failure, in any state of the group.

        Errors are ignored, because the caller reports the failure that happened before this call.
        """
        with suppress(Exception):
            self.abort()
        if not self.ranks.stuck:
            self.ranks.run(lambda rank: _close_quietly(self.transports[rank]), self.deadline_s)
        self.ranks.close()


def finish(work: Work, deadline_s: float = 3600.0) -> None:
    """Wait until ``work`` is complete. Raise AssertionError if it is not complete after ``deadline_s`` seconds.

    The default is one hour, because the deadline of the group normally ends a test much earlier.
    """
    until_s = time.monotonic() + deadline_s
    while not work.wait(0.1):
        assert time.monotonic() < until_s, f"a Work was not complete within {deadline_s:g} s"


def _call(function: Callable[[], None], errors: list[Exception]) -> None:
    try:
        function()
    except Exception as error:
        errors.append(error)


def _close_quietly(transport: Transport) -> Any:
    try:
        transport.close()
    except Exception as error:  # report the failure that led here instead
        return error
    return None
