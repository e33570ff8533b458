"""An elastic training whose rank 1 dies by SIGKILL in its first world, at step 30."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import ddlcore as ddl
from ddlcore.api import elastic

HERE = Path(os.environ["WAY_DIR"])
ddl.init()


@elastic.run
def train(state: Any) -> None:
    (HERE / f"rank{ddl.rank()}.{os.getpid()}").touch()
    last = state.done + 10  # steps that the new process does with the other one
    while not (state.done >= last and ddl.size() == 2 and ddl.stats()["world"]["ranks_lost"]):
        state.total = state.total + ddl.allreduce(np.ones(4, np.float32), name="x")
        state.done += 1
        state.commit()
        time.sleep(0.02)
        if state.done == 30 and ddl.rank() == 1:
            (HERE / "go").touch()
            os.kill(os.getpid(), signal.SIGKILL)


train(elastic.ObjectState(total=np.zeros(4, np.float32), done=0))
