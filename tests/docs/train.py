"""What the tests have for the reader's train.py, where a page has none: steps that repeat, some input, no framework."""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import ddlcore as ddl


def batches(steps: int) -> Iterator[Any]:
    for step in range(steps):
        time.sleep(0.0002)
        yield np.full(1000, float(step + ddl.rank()))


ddl.init()
weights = np.zeros(1000)
for batch in batches(int(os.environ.get("STEPS", "60"))):
    weights -= 0.01 * ddl.allreduce(weights - batch, name="gradient")
print(f"rank {ddl.rank()} of {ddl.size()} is done")
