"""torch's Gloo as a peer of `ddl bench`: a process group of its own, beside whatever the user's program has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.transport import Context
from ddlcore.types import Kind

__all__ = ["GlooPeer"]

_LOOPBACK = "127.0.0.1"
_DTYPES = frozenset({"uint8", "int8", "int32", "int64", "float16", "float32", "float64"})  # 16-bit integers it lacks


class GlooPeer(BenchPeer):
    """``ProcessGroupGloo`` over TCP, with torch's own defaults."""

    def __init__(self) -> None:
        self._group: Any = None
        self._store: Any = None

    def open(self, context: Context) -> None:
        """Raises DeadlineExceeded past ``context.timeout_s``; RuntimeError where torch lacks Gloo, or cannot connect."""
        timeout = timedelta(seconds=context.timeout_s)
        first = context.rank == 0
        port = 0 if first else int(context.store.get("port", context.timeout_s))
        self._store = dist.TCPStore(_LOOPBACK, port, is_master=first, timeout=timeout, wait_for_workers=False)
        if first:
            context.store.set("port", str(self._store.port).encode())
        self._group = dist.ProcessGroupGloo(self._store, context.rank, context.size, timeout)

    def operation(self, kind: Kind, source: Any, target: Any) -> Callable[[], object]:
        group = self._group
        if source.dtype.name not in _DTYPES:
            raise NotImplementedError(f"Gloo has no {source.dtype}")
        into, out = torch.from_numpy(source), torch.from_numpy(target)
        if kind is Kind.ALLREDUCE:
            return lambda: group.allreduce([out]).wait()
        if kind is Kind.BROADCAST:
            return lambda: group.broadcast([out], dist.BroadcastOptions()).wait()  # from rank 0
        if kind is Kind.ALLGATHER:
            return lambda: group._allgather_base(out, into).wait()
        if kind is Kind.REDUCESCATTER:
            return lambda: group._reduce_scatter_base(out, into).wait()
        if kind is Kind.ALLTOALL:
            return lambda: group.alltoall_base(out, into, [], []).wait()
        raise NotImplementedError(f"Gloo has no {kind.name.lower()}")

    def close(self) -> None:
        self._group = None
        self._store = None
