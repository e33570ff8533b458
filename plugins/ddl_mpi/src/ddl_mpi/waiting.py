"""Wait for requests of MPI without a blocking call of MPI: test the request, yield, sleep, and check for an abort."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ddlcore.contracts.transport import Work

LONGEST_SLEEP_S = 0.5e-3
SLEEP_SHARE = 0.1  # a sleep takes at most this share of the wait so far, because a sleep may be longer than needed


class WaitTimes(NamedTuple):
    """The two times that control a wait, in seconds since the begin of the wait.

    Until ``spin_s``, a rank tests the request without pause. Until ``yield_s``, the rank yields the core between two
    tests. Then the rank sleeps between two tests.
    """

    spin_s: float
    yield_s: float


ARRIVAL = WaitTimes(15e-6, 100e-6)  # wait for other ranks, which may compute for a long time, perhaps on this core
DATA = WaitTimes(2e-3, 50e-3)  # wait for data after all ranks have begun; it is long only if another rank is stopped
CROWDED = WaitTimes(15e-6, 50e-3)  # the same if ranks share cores: to spin would delay the rank that has the data
Step = tuple[Any, WaitTimes]  # a started request of MPI, and the times of the wait for it


class Steps(Work):
    """A collective that consists of steps. A step is a request of MPI, and begins when the step before it is complete.

    ``check`` is called often during a wait, and may raise an exception to stop the collective. ``fail`` converts an
    error of MPI to an error of ddl. ``done`` is called after the last step.
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

    # MPI moves bytes only while a thread is inside a call of MPI. So a rank that sleeps delays its own transfer, and
    # the other ranks that wait for its data. MPI_Wait would move bytes, but it uses the whole core, and neither
    # ``abort`` nor a signal could end it. Therefore ``wait`` calls Test repeatedly, and checks for an abort between the
    # calls. It sleeps only when the step has taken so long that the delay by a sleep does not matter any more.
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

    def _waited(self, test: Callable[[], bool], patience: WaitTimes, until_s: float) -> bool:
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
