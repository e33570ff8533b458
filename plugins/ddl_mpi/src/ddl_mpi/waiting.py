"""Waits for MPI without blocking in it: tests requests, yields, sleeps, and checks for an abort."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ddlcore.contracts.transport import Work

LONGEST_SLEEP_S = 0.5e-3
SLEEP_SHARE = 0.1  # a sleep is at most this part of the time waited so far: it delays noticing the completion


class Patience(NamedTuple):
    """The two times of a wait, both counted from its beginning.

    Until ``spin_s`` a rank tests without pause, and until ``yield_s`` it yields the core between tests. After that it
    sleeps between tests.
    """

    spin_s: float
    yield_s: float


ARRIVAL = Patience(15e-6, 100e-6)  # waiting for peers to call, which may compute for long, perhaps on this core
DATA = Patience(2e-3, 50e-3)  # waiting for data when all peers have called; it takes longer only if one is stopped
CROWDED = Patience(15e-6, 50e-3)  # as DATA, if ranks share cores: spinning would delay the peer that is waited for
Step = tuple[Any, Patience]  # a started request of MPI, and how to wait for it


class Steps(Work):
    """A collective made of steps. Each step begins when the previous one is complete.

    ``check`` may raise to stop the collective. ``fail`` converts an error of MPI to one of ddl. ``done`` is called
    after the last step.
    """

    __slots__ = ("_check", "_done", "_fail", "_since_s", "_step", "_steps")

    def __init__(
        self,
        steps: Iterator[Step],
        check: Callable[[], None],
        fail: Callable[[Exception], Exception],
        done: Callable[[], None],
    ) -> None:
        self._steps: Iterator[Step] | None = steps
        self._check = check
        self._fail = fail
        self._done = done
        self._since_s = 0.0
        self._step: Step | None = None
        self._go_on()

    # MPI moves bytes only while a thread is inside one of its calls, because nothing else makes progress for it. A rank
    # that sleeps delays its own transfer and those of the peers that wait for its part. MPI_Wait would make progress,
    # but it spins at full load, and neither ``abort`` nor a signal could end it. Therefore ``wait`` calls Test
    # repeatedly, checks for an abort in between, and sleeps only when the step has taken so long that the delay no
    # longer matters.
    def wait(self, timeout_s: float) -> bool:
        until_s = 0.0
        while self._step is not None:
            request, patience = self._step
            self._check()
            try:
                if not request.Test():
                    until_s = until_s or time.monotonic() + timeout_s
                    if not self._waited(request.Test, patience, until_s):
                        return False
            except Exception as error:
                raise self._fail(error) from error
            self._since_s = 0.0
            self._go_on()
        self._check()
        return True

    def _go_on(self) -> None:
        if self._steps is None:
            return
        try:
            self._step = next(self._steps, None)
        except Exception as error:
            raise self._fail(error) from error
        if self._step is None:
            self._steps = None
            self._done()

    def _waited(self, test: Callable[[], bool], patience: Patience, until_s: float) -> bool:
        now_s = time.monotonic()
        since_s = self._since_s = self._since_s or now_s
        while not test():
            self._check()
            now_s = time.monotonic()
            if now_s >= until_s:
                return False
            waited_s = now_s - since_s
            if waited_s < patience.spin_s:
                continue
            if waited_s < patience.yield_s:
                os.sched_yield()
            else:
                time.sleep(min(LONGEST_SLEEP_S, waited_s * SLEEP_SHARE, until_s - now_s))
        return True
