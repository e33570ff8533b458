"""ddl as one of several backends of a process group, such as "cpu:ddl,cuda:nccl". Needs torch 2.14."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Backend

from ddl_torch.distributed.group import DdlGroup
from ddl_torch.distributed.uncompiled import uncompiled


@uncompiled
class DdlBackend(DdlGroup, Backend):
    """The backend for some of the devices of a process group. torch's own ProcessGroup calls it.

    The works that torch returns to the caller know only ``wait`` and ``get_future``: their ``is_completed`` is always
    False.
    """

    @property
    def options(self) -> Any:
        return Backend.Options("ddl", self._timeout)

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)
