"""Time contenders in alternation, so that changes of the machine's speed affect all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddlcore.commands.bench.contenders import Call, finish
from ddlcore.commands.bench.results import WHOLE
from ddlcore.contracts.transport import Transport
from ddlcore.types import Buffer, DType

_WARM = 5  # calls: pages, caches, connections
_SCHEDULE = 40  # most times that four calls are made until the whole call is replayed
_MOST = 2000  # calls in one round


class Together:
    """The operations by which the ranks synchronise and exchange numbers around each measurement.

    They use the open transport, so that ddl's own tensor queue stays empty.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._size = transport.context.size

    def barrier(self) -> None:
        finish(self._transport.barrier())

    def of_first(self, value: float) -> float:
        """Return, on all ranks, the ``value`` that rank 0 has passed."""
        one = np.array([value])
        finish(self._transport.broadcast(_buffer(one), 0))
        return float(one[0])

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return, for each of ``values``, its maximum over all ranks."""
        mine, everyone = np.array(values), np.zeros(self._size * len(values))
        finish(self._transport.allgatherv(_buffer(mine), _buffer(everyone), [len(values)] * self._size))
        return [float(value) for value in everyone.reshape(self._size, -1).max(axis=0)]


def measure(
    calls: Mapping[str, Call], together: Together, rounds: int, budget_s: float, replayed: Callable[[], int]
) -> tuple[dict[str, list[float]], float]:
    """Return the times of each contender's call, and which share of its calls was replayed completely.

    The times are seconds per call on the slowest rank, one value for each round. Each contender runs for about
    ``budget_s`` seconds in each of ``rounds`` rounds; rank 0 decides how often all ranks repeat its call.
    ``replayed()`` returns how many of this rank's buckets were replayed so far; a call counts as replayed if all of its
    buckets were.
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
    """Warm up the call. If it is a whole call, run it until it is replayed, if replay is on and a schedule is found.

    ``replayed`` is None for all other calls.
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
