"""How a rank waits for MPI without being lost in it: it asks, yields, sleeps, and looks whether it was told to stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from ddlcore.contracts.transport import Work

__all__ = ["ARRIVAL", "DATA", "Patience", "Step", "Steps"]

SPINS = 20  # about 15 µs
ARRIVAL_YIELD_S = (
    100e-6  # what others of this core may use at once; then this rank sleeps, for peers may compute for long
)
DATA_YIELD_S = 0.05  # all have come and the bytes move only while MPI is asked; who takes longer has been stopped
LONGEST_SLEEP_S = 0.5e-3
SLEEP_SHARE = 0.1  # of the time waited so far: so much later a rank may notice

Patience = float
ARRIVAL: Patience = ARRIVAL_YIELD_S
DATA: Patience = DATA_YIELD_S
Step = tuple[Any, Patience]  # a started request of MPI, and for how long to yield rather than to sleep


class Steps(Work):
    """A collective as steps, each begun when the one before it is complete.

    ``check`` raises what is to be raised instead of going on; ``fail`` maps what MPI raises.
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

    def wait(self, timeout_s: float) -> bool:
        until_s = 0.0
        while self._step is not None:
            request, patience_s = self._step
            try:
                if not self._asked(request.Test):
                    until_s = until_s or time.monotonic() + timeout_s
                    if not self._waited(request.Test, patience_s, until_s):
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

    def _asked(self, test: Callable[[], bool]) -> bool:
        self._check()
        if self._since_s:  # waited for before
            return test()
        return any(test() for _ in range(SPINS))

    def _waited(self, test: Callable[[], bool], patience_s: float, until_s: float) -> bool:
        now_s = time.monotonic()
        since_s = self._since_s = self._since_s or now_s
        while not test():
            self._check()
            now_s = time.monotonic()
            if now_s >= until_s:
                return False
            waited_s = now_s - since_s
            if waited_s < patience_s:
                os.sched_yield()
            else:
                time.sleep(min(LONGEST_SLEEP_S, waited_s * SLEEP_SHARE, until_s - now_s))
        return True
