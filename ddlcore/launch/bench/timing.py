"""Times the contenders of one collective and size in alternation, so that what the machine does meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddlcore.contracts.transport import Transport
from ddlcore.launch.bench.contenders import WHOLE, Call
from ddlcore.types import Buffer, DType

__all__ = ["Times", "Together", "measure"]

Times = dict[str, list[float]]  # seconds a call of each contender, by round


class Together:
    """What the ranks agree upon between measurements, through the open transport: ddl's own queue stays empty."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def barrier(self) -> None:
        self._finish(self._transport.barrier())

    def of_first(self, values: list[float]) -> list[float]:
        """Those of rank 0, everywhere."""
        one = np.array(values)
        self._finish(self._transport.broadcast(self._buffer(one), 0))
        return list(map(float, one))

    def slowest(self, values: list[float]) -> list[float]:
        """The greatest of any rank, one by one."""
        mine = np.array(values)
        size = self._transport.context.size
        all_of_them = np.zeros(size * len(values))
        self._finish(self._transport.allgatherv(self._buffer(mine), self._buffer(all_of_them), [len(values)] * size))
        return list(map(float, all_of_them.reshape(size, -1).max(axis=0)))

    @staticmethod
    def _buffer(array: Any) -> Buffer:
        return Buffer(array.__array_interface__["data"][0], array.size, DType.F64, array.shape, owner=array)

    @staticmethod
    def _finish(work: Any) -> None:
        while not work.wait(0.1):
            pass


@dataclass(frozen=True)
class Effort:
    """How long it takes: seconds for one contender in one round, and how many rounds."""

    rounds: int
    budget_s: float = 0.05
    most: int = 2000  # calls in a round


def measure(
    calls: Mapping[str, Call], together: Together, effort: Effort, replayed: Callable[[], int] = int
) -> Times:
    """Seconds a call (of the slowest rank), by contender and round; every rank repeats as often as rank 0 says."""
    repeats = {}
    for name, call in calls.items():
        warm(call, together, replayed if name == WHOLE else None)
        once_s = together.of_first([seconds(call, 3, together)])[0]
        repeats[name] = int(max(1, min(effort.most, effort.budget_s / once_s)))
    times: Times = {name: [] for name in calls}
    names = list(calls)
    for number in range(effort.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(seconds(calls[name], repeats[name], together))
    return {name: together.slowest(values) for name, values in times.items()}


def warm(call: Call, together: Together, replayed: Callable[[], int] | None) -> None:
    """Pages, routes, caches; for the whole call also a schedule, where replay is on and finds one."""
    for _ in range(5):
        call()
    if replayed is None:
        return
    for _ in range(40):
        before = replayed()
        for _ in range(4):
            call()
        if together.of_first([float(replayed() > before)])[0]:
            return


def seconds(call: Call, repeat: int, together: Together) -> float:
    """Of one call, on this rank."""
    together.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat
