"""One rank of an elastic training that notes when each step was applied: `TIME STEP SIZE HOST` in steps.PLACE.PID."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

import ddlcore as ddl
from ddlcore.api.elastic import ObjectState, run


def main() -> None:
    ddl.init()
    place, until_s = os.environ["DDL_RANK"], time.monotonic() + 90.0

    @run
    def train(state: Any) -> None:
        with open(f"steps.{place}.{os.getpid()}", "a", buffering=1) as steps:
            while time.monotonic() < until_s:
                over = float(Path("enough").exists())
                total = ddl.allreduce(np.array([1.0, over]), name="x", op=ddl.Sum)
                assert total[0] == ddl.size()
                state.total += 1.0
                # commit() counts the step, and raises an exception where ranks join or leave.
                print(f"{time.time():.6f} {state.steps + 1} {ddl.size()} {socket.gethostname()}", file=steps)
                state.commit()
                if total[1]:
                    return
                time.sleep(0.01)

    state = ObjectState(total=0.0)
    train(state)
    print(f"total {state.total == state.steps} ranks {ddl.size()}", flush=True)


if __name__ == "__main__":
    main()
