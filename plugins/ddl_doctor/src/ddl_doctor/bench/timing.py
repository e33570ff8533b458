"""Time the contenders in turns, so that a change of the machine's speed affects all contenders equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddl_doctor.bench.contenders import Call, finish
from ddl_doctor.bench.results import WHOLE
from ddlcore.contracts.transport import Transport
from ddlcore.types import Buffer, DType

_WARM = 5  # calls before the measurement: they load pages, fill caches and open connections
_SCHEDULE = 40  # at most so many groups of four calls are made to get the whole call into replay
_MOST = 2000  # at most so many calls in one round


class Together:
    """Operations that all ranks run together before and after a measurement, to synchronise and to exchange numbers.

    The operations use the open transport directly, so that ddl's tensor queue stays empty. Every rank must call them.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._size = transport.context.size

    def barrier(self) -> None:
        """Wait for all ranks."""
        finish(self._transport.barrier())

    def of_first(self, value: float) -> float:
        """Return, on all ranks, the ``value`` that rank 0 passed to this method."""
        one = np.array([value])
        finish(self._transport.broadcast(_buffer(one), 0))
        return float(one[0])

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return the maximum over all ranks for each position in ``values``. All ranks pass equally many values."""
        mine, everyone = np.array(values), np.zeros(self._size * len(values))
        finish(self._transport.allgatherv(_buffer(mine), _buffer(everyone), [len(values)] * self._size))
        return [float(value) for value in everyone.reshape(self._size, -1).max(axis=0)]


def measure(
    calls: Mapping[str, Call], together: Together, rounds: int, budget_s: float, replayed: Callable[[], int]
) -> tuple[dict[str, list[float]], float]:
    """Time each of ``calls`` in ``rounds`` rounds. Return the times of each contender, and the share of replayed calls.

    The times are seconds per call on the slowest rank, one value for each round. In each round, each contender runs for
    about ``budget_s`` seconds; rank 0 decides how often all ranks repeat the call.

    The second value is the share (0 to 1) of ddl's whole calls that ran in replay on this rank. It is 0 if the whole
    call is not timed. ``replayed()`` returns the number of buckets that this rank has replayed so far. A whole call has
    one bucket.
    """
    repeats = {}
    for name, call in calls.items():
        _warm(call, together, replayed if name == WHOLE else None)
        once_s = together.of_first(_seconds(call, 3, together))
        repeats[name] = int(max(1, min(_MOST, budget_s / once_s)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    before = replayed()
    for number in range(rounds):
        first = number % len(names)  # another order in each round: a contender may affect the one after it
        for name in names[first:] + names[:first]:
            times[name].append(_seconds(calls[name], repeats[name], together))
    share = (replayed() - before) / (rounds * repeats[WHOLE]) if WHOLE in calls else 0.0
    return {name: together.slowest(values) for name, values in times.items()}, share


def _warm(call: Call, together: Together, replayed: Callable[[], int] | None) -> None:
    """Warm up: make ``call`` a few times. If it is ddl's whole call, then repeat it until ddl replays it.

    The repetitions end after 160 calls, because ddl may never replay the call: replay may be off, or no schedule may be
    found. ``replayed`` returns the number of replayed buckets on this rank; it is None if ``call`` is not ddl's whole
    call.
    """
    for _ in range(_WARM):
        call()
    for _ in range(_SCHEDULE if replayed is not None else 0):
        assert replayed is not None
        before = replayed()
        for _ in range(4):
            call()
        if together.of_first(replayed() - before) >= 4:
            return


def _seconds(call: Call, repeat: int, together: Together) -> float:
    together.barrier()
    begun_s = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - begun_s) / repeat


def _buffer(array: Any) -> Buffer:
    return Buffer(array.__array_interface__["data"][0], array.size, DType.F64, array.shape, owner=array)
