"""torch's default group in an elastic job: one group for each world."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from ddlcore.api import rank, size


@contextmanager
def process_group(timeout: timedelta = timedelta(minutes=30)) -> Iterator[None]:
    """Make torch's default group, with the backend ``ddl`` and the ranks of this world. Destroy it at the end of the block.

    For a training function of ``elastic.run`` that uses torch.distributed: the function enters the block once in each
    world, and makes in it what depends on the group, such as DistributedDataParallel around the model of its state.
    All ranks of the world must enter the block. ``timeout``: of the group, as for ``init_process_group``.
    """
    import torch.distributed as dist

    from ddl_torch.distributed.store import DdlStore

    # What an earlier world has wrapped around the model may still be there in a reference cycle. Its hooks would act at
    # the next backward, too.
    gc.collect()
    store = DdlStore("elastic", timeout)
    dist.init_process_group("ddl", store=store, rank=rank(), world_size=size(), timeout=timeout)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
