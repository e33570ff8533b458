"""How a rank waits for MPI without being lost in it: it asks, yields, sleeps, and looks whether it was told to stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ddlcore.contracts.transport import Work

__all__ = ["ARRIVAL", "CROWDED", "DATA", "Patience", "Step", "Steps"]

LONGEST_SLEEP_S = 0.5e-3
SLEEP_SHARE = 0.1  # of the time waited so far: so much later a rank may notice


class Patience(NamedTuple):
    """For how long a rank asks without a pause, and for how long it then yields before it sleeps."""

    spin_s: float
    yield_s: float


ARRIVAL = Patience(15e-6, 100e-6)  # others of this core may compute, for long
DATA = Patience(2e-3, 50e-3)  # all have come, and bytes move only while MPI is asked; who takes longer was stopped
CROWDED = Patience(15e-6, 50e-3)  # the same where ranks share cores: who spins holds up whom it waits for
Step = tuple[Any, Patience]  # a started request of MPI, and how to wait for it


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
