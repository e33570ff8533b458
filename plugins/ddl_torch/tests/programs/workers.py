"""Runs DataLoader workers that are started after init(): collectives in them raise, and their end harms no job."""

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
    """A data set whose items are 1 if a collective in the worker raised an error that says what to do, else 0."""

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
    """Return a loader in each of whose workers every call has raised, and an object that keeps the workers alive."""
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
    kept = working(context)  # the workers live as long as this variable
    ddl.barrier()
    if ddl.rank() == 1:
        print(f"killed {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # its workers live on for a while
    try:
        ddl.allreduce(torch.ones(1))
    except ddl.PeerLost as error:
        print(f"lost {error.ranks} {time.time()}", flush=True)
    del kept


if __name__ == "__main__":
    main(*sys.argv[1:])
