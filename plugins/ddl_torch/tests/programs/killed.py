"""Runs a program of torch.distributed in which rank 1 is killed once, after some steps; others say what they raise."""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 30
taken = [0]


def main(mark: Path, program: str, *args: str) -> None:
    def stepped(*_: Any) -> None:
        taken[0] += 1
        if taken[0] == STEPS and dist.get_rank() == 1 and not mark.exists():
            mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(stepped)
    sys.argv = [program, *args]
    sys.path.insert(0, str(Path(program).parent))
    try:
        runpy.run_path(program, run_name="__main__")
    except Exception as error:
        passed_s = time.time() - float(mark.read_text())
        print(f"rank {dist.get_rank()} raised after {passed_s:.2f} s: {type(error).__name__}: {error}", flush=True)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
