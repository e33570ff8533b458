"""One communicator whose ranks are threads of this process, with guarded memory to see what it writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.store import PrefixStore
from ddlcore.contracts.transport import Context, Transport, Work
from ddlcore.testing.oracle import Array, difference
from ddlcore.testing.ranks import Ranks
from ddlcore.testing.store import ThreadStore
from ddlcore.types import Buffer, DType, Member

__all__ = ["Area", "Case", "Group", "finish"]

T = TypeVar("T")
Call = Callable[[Transport, Buffer, Buffer], Work]

GUARD_BYTES = 256
GUARD_VALUE = 0xA5
ABORT_S = 10.0  # the contract gives it 1; this is for a busy machine


class Area:
    """An array between guards. ``offset`` (elements) moves it away from a cache line's begin."""

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
        """Empty where the guards stand, else what was written over."""
        for name, guard in (("before", self._raw[: self._begin]), ("behind", self._raw[self._end :])):
            if (guard != GUARD_VALUE).any():
                return f"bytes {name} the memory were written over"
        return ""


@dataclass(repr=False)
class Case:
    """One collective on every rank, with what it must give. ``targets`` None: in place."""

    label: str
    call: Call
    sources: Sequence[Area]
    expected: Sequence[Array]
    targets: Sequence[Area] | None = None
    terms: int = 1  # how many values are added into one
    exact: bool = True
    before: list[Array] = field(default_factory=list)  # the sources as they were

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
        """From arrays by rank; targets begin as garbage. ``offsets``: of sources and targets."""
        areas = [Area(source, offsets[0]) for source in sources]
        garbage = [np.frombuffer(b"\x5b" * e.nbytes, np.uint8).view(e.dtype) for e in expected]
        targets = None if in_place else [Area(array, offsets[1]) for array in garbage]
        where = f"{label}, in place" if in_place else label
        return cls(where, call, areas, expected, targets, len(sources), exact, [area.array.copy() for area in areas])

    def __repr__(self) -> str:
        return f"<{self.label}>"

    def memory(self, rank: int) -> tuple[Area, Area]:
        """Source and target; the same one in place."""
        return self.sources[rank], (self.targets or self.sources)[rank]

    def run(self, rank: int, transport: Transport) -> None:
        """This rank's part, until it is complete."""
        source, target = self.memory(rank)
        finish(self.call(transport, source.buffer, target.buffer))

    def check(self) -> None:
        """AssertionError that names case, rank and element, where a rank's memory is not as it must be."""
        for rank, expected in enumerate(self.expected):
            source, target = self.memory(rank)
            faults = [difference(target.array, expected, terms=self.terms, exact=self.exact), target.damage()]
            if self.targets is not None:
                changed = difference(source.array, self.before[rank])
                faults += [f"the source was changed: {changed}" if changed else "", source.damage()]
            text = "; ".join(fault for fault in faults if fault)
            assert not text, f"{self.label}: rank {rank} of {len(self.expected)}: {text}"


class Group:
    """n transports, each on a thread of its own from open to close."""

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
        self._hangs = False  # some rank's abort never returned
        self._contexts = [
            Context(rank, tuple(members), PrefixStore(f"{name}/", self.stores), kernels, settings, deadline_s, name)
            for rank in range(self.size)
        ]

    def open(self) -> None:
        """Every rank opens. What a failed open leaves is closed."""
        try:
            self.run(lambda rank, transport: transport.open(self._contexts[rank]))
        except BaseException:
            self.discard()
            raise

    def context(self, rank: int) -> Context:
        """What ``rank`` opens with."""
        return self._contexts[rank]

    def run(self, function: Callable[[int, Transport], T], deadline_s: float | None = None) -> list[T]:
        """``function(rank, transport)`` on every rank; aborts the transports when that does not end."""
        return self.ranks.run(
            lambda rank: function(rank, self.transports[rank]), deadline_s or self.deadline_s, self.abort
        )

    def abort(self) -> None:
        """Every rank's abort, each from a thread of its own. AssertionError where one does not return, or what it raises."""
        assert not self._hangs, "abort did not return the time before"
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
        """Every rank closes, none waiting for another, and its thread ends."""
        if not self.ranks.stuck:
            self.run(lambda rank, transport: transport.close())
        self.ranks.close()

    def discard(self) -> None:
        """Abort, close and forget, whatever state the group is in; another failure led here, so none of these shows."""
        with suppress(Exception):
            self.abort()
        if not self.ranks.stuck:
            self.ranks.run(lambda rank: _close_quietly(self.transports[rank]), self.deadline_s)
        self.ranks.close()


def finish(work: Work, deadline_s: float = 3600.0) -> None:
    """Waits for ``work``; the group's own deadline stands above this one."""
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
    except Exception as error:  # the failure that led here is the one to show
        return error
    return None
