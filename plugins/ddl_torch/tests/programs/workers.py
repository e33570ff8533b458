"""DataLoader workers made after init(): what collectives do in them, and what their end does to the job."""

from __future__ import annotations

import os
import signal
import sys
import time

import ddl_torch as ddl
import torch
from torch.utils.data import DataLoader, Dataset


def reduce() -> None:
    ddl.allreduce(torch.ones(1))


def begin() -> None:
    ddl.init()
    ddl.barrier()


class Trying(Dataset[torch.Tensor]):
    """Each item is what a collective raised in the worker: 1 for an error that says what to do, else 0."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        seen = 0
        for call in (reduce, ddl.barrier, begin):
            try:
                call()
            except (RuntimeError, ValueError) as error:
                seen += "init" in str(error)
        return torch.tensor(seen)


def working(context: str) -> tuple[DataLoader[torch.Tensor], object]:
    """A loader and what keeps its workers alive; in each of them every call has raised."""
    loader = DataLoader(Trying(), batch_size=2, num_workers=2, multiprocessing_context=context, persistent_workers=True)
    batches = iter(loader)
    raised = torch.cat(list(batches)).tolist()
    assert raised == [3] * 8, raised
    return loader, batches


def main(context: str) -> None:
    ddl.init()
    kept = working(context)
    del kept  # ends the workers
    time.sleep(0.2)
    print("sum", ddl.allreduce(torch.ones(1), op=ddl.Sum).item(), flush=True)
    kept = working(context)  # they live while this does
    ddl.barrier()
    if ddl.rank() == 1:
        print(f"killed {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # its workers live on for a while, with what they have inherited
    try:
        ddl.allreduce(torch.ones(1))
    except ddl.PeerLost as error:
        print(f"lost {error.ranks} {time.time()}", flush=True)
    del kept


if __name__ == "__main__":
    main(*sys.argv[1:])
