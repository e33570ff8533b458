"""Trains until it is to stop; rank 0 gets SIGUSR1 between two worlds, where it has no job that could tell the others."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import ddlcore as ddl
from ddlcore.api.elastic import ObjectState, run
from ddlcore.errors import DdlInternalError

ddl.init()
failed: list[int] = []
ranks: list[int] = []  # this process's rank in the first world


class Signalled(ObjectState):
    def restore(self) -> None:
        if failed == [1]:  # this process has left its world, and has not registered for the next one
            failed.append(2)
            if ranks == [0]:
                os.kill(os.getpid(), signal.SIGUSR1)
        super().restore()


@run
def train(state: Any) -> None:
    while not ddl.should_stop():
        ddl.allreduce(np.ones(1), name="one")
        state.commit()
        if state.steps == 5 and not failed:
            failed.append(1)
            ranks.append(ddl.rank())
            raise DdlInternalError("begins a new world")
        assert state.steps < 100_000


state = Signalled()
train(state)
print(f"stopped after {state.steps > 5}", flush=True)
