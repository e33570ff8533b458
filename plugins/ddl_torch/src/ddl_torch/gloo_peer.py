"""Lets `ddl bench` compare ddl with torch's Gloo, which runs in a process group separate from those of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store as TorchStore

from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.store import Store
from ddlcore.contracts.transport import Context
from ddlcore.types import Kind

# The types that Gloo reduces or moves; it has no 16-bit integers.
_DTYPES = frozenset({"uint8", "int8", "int32", "int64", "float16", "float32", "float64"})


class GlooPeer(BenchPeer):
    """``ProcessGroupGloo`` over TCP with torch's defaults, for `ddl bench`.

    Its ranks find each other through ddl's own store.
    """

    def __init__(self) -> None:
        self._group: Any = None

    def open(self, context: Context) -> None:
        """Create the process group. Raises RuntimeError if torch has no Gloo, or if its sockets do not connect."""
        if not dist.is_gloo_available():
            raise RuntimeError("this torch was built without Gloo; pip install torch")
        timeout = timedelta(seconds=context.timeout_s)
        self._group = dist.ProcessGroupGloo(_Meeting(context.store), context.rank, context.size, timeout)

    def operation(self, kind: Kind, source: Any, target: Any) -> Callable[[], object]:
        if source.dtype.name not in _DTYPES:
            raise NotImplementedError(f"Gloo has no {source.dtype.name}")
        group, into, out = self._group, torch.from_numpy(source), torch.from_numpy(target)
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
        raise NotImplementedError(f"no {kind.name.lower()} is measured")

    def close(self) -> None:
        self._group = None


class _Meeting(TorchStore):
    """ddl's key-value store with the interface of torch's Store.

    It opens no port, so no foreign process can connect to it.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._store.get(key, 0.0)  # no timeout needed: Gloo calls ``wait`` first

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:  # type: ignore[override]  # one of two overloads
        for key in keys:
            self._store.get(key, timeout.total_seconds())
