"""One rank of an elastic training in float64: each step's 24 rows are shared by whatever ranks there are."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import ddlcore as ddl
from ddlcore.api.elastic import ObjectState, run
from tests.faults.marks import has_state

Array = np.ndarray[Any, np.dtype[np.float64]]
WIDTH, ROWS = 40, 24


def gradient(weights: Array, step: int, rows: range) -> Array:
    """Return the sum over ``rows`` of the gradients of |x·w - 1|² in step ``step``."""
    total = np.zeros(WIDTH)
    for row in rows:
        x = np.random.default_rng((step, row)).normal(size=WIDTH)
        total += 2 * (x @ weights - 1.0) * x
    return total


def undisturbed(steps: int) -> Array:
    """Return the weights that one process computes."""
    weights = np.zeros(WIDTH)
    for step in range(steps):
        weights -= 0.002 / ROWS * gradient(weights, step, range(ROWS))
    return weights


def main() -> None:
    steps, folder, pause_s = int(os.environ["STEPS"]), Path(os.environ["FOLDER"]), float(os.environ["PAUSE_S"])
    until_s = time.monotonic() + float(os.environ["PATIENCE_S"])
    ddl.init()
    more = np.zeros(int(os.environ.get("STATE_BYTES", "0")) // 8)  # so that taking over the state takes a while
    state = ObjectState(weights=np.zeros(WIDTH), log=[], more=more)

    @run
    def train(state: Any) -> None:
        has_state()
        while state.steps < steps:
            while state.steps == steps - 40 and not (folder / "enough").exists() and time.monotonic() < until_s:
                time.sleep(0.02)
                state.check_host_updates()  # ranks are lost and join here, too
            step = state.steps
            part = gradient(state.weights, step, range(ddl.rank(), ROWS, ddl.size()))
            total = ddl.allreduce(part, name="gradient", op=ddl.Sum)
            state.weights = state.weights - 0.002 / ROWS * total
            state.log.append(step)
            state.commit()
            time.sleep(pause_s)

    train(state)
    right = np.allclose(state.weights, undisturbed(steps), rtol=1e-10, atol=1e-12)
    print(f"right {right} once {state.log == list(range(steps))} ranks {ddl.size()}", flush=True)


if __name__ == "__main__":
    main()
