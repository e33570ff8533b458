"""torch's names for Gloo, and its traps: the only file that calls them.

They are the names that torch 2.13 to 2.15 have in common. Those that 2.15 renames (``_allgather_base``,
``_reduce_scatter_base``, ``alltoall_base``) are not needed: what they do is done by ``send`` and ``recv``.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddlcore.types import Buffer, DType, ReduceOp

__all__ = ["NATIVE", "Group", "Message", "Pending", "tensor"]

# By which of torch's types and ops Gloo reduces one of ours. It has no 16-bit integers, adds 16-bit floats in
# 16 bits, and gives the least or greatest of floats by comparing, which loses a NaN or not as the order falls.
_TYPES = {
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
    DType.BOOL: torch.uint8,
}
_OPS = {ReduceOp.Sum: "SUM", ReduceOp.Min: "MIN", ReduceOp.Max: "MAX", ReduceOp.Product: "PRODUCT"}
_OF_BOOL = {ReduceOp.Sum: "MAX", ReduceOp.Min: "MIN", ReduceOp.Max: "MAX", ReduceOp.Product: "MIN"}
_ORDERED = (ReduceOp.Min, ReduceOp.Max)

NATIVE = frozenset((dtype, op) for dtype in _TYPES for op in _OPS if not (dtype.is_float and op in _ORDERED))

_FOREVER = timedelta(days=365)  # a slow peer is not a dead one; abort ends what waits
_VIEWS = 64  # of memory, kept; fusion buffers come again and again
_TAG = 0  # of all messages: between two ranks they arrive in the order in which they were sent


def tensor(address: int, count: int, dtype: DType = DType.U8) -> torch.Tensor:
    """One-dimensional, without a copy, of at least one element. Who calls keeps the memory's owner alive."""
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=_TYPES[dtype])


class Group:
    """The ranks of one communicator, all connected to each other. One thread calls at a time."""

    def __init__(self, store: Any, rank: int, size: int, address: str, timeout_s: float) -> None:
        """Listens at ``address``, this host's own, and meets the others over ``store``, within ``timeout_s``.

        Raises RuntimeError, and what the store raises.
        """
        if not dist.is_gloo_available():
            raise RuntimeError("this torch was built without Gloo; pip install torch")
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # gloo.Options are another class
        # Lazily, a peer that dies before the first collective would be waited for without end.
        options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
        options._threads = (
            2  # as Gloo has by default; with one, calls that follow each other take up to 1.7 times as long
        )
        options._timeout = timedelta(seconds=timeout_s)
        options.global_ranks_in_group = list(range(size))
        options.group_name = "ddl"
        self._group = gloo(store, rank, size, options)
        self._reductions = {name: self._reduction(name) for name in _OPS.values()}
        self._views: dict[tuple[int, int, DType], torch.Tensor] = {}
        self._barrier = dist.BarrierOptions()
        self._barrier.timeout = _FOREVER

    @staticmethod
    def _reduction(name: str) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, name)
        options.timeout = _FOREVER
        return options

    def allreduce(self, memory: Buffer, op: ReduceOp) -> Pending:
        """In place, of a type and op of NATIVE, and at least one element."""
        options = self._reductions[(_OF_BOOL if memory.dtype is DType.BOOL else _OPS)[op]]
        return Pending(self._group.allreduce([self._view(memory.address, memory.count, memory.dtype)], options))

    def broadcast(self, memory: Buffer, root: int) -> Pending:
        """In place, of at least one byte."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = _FOREVER
        return Pending(self._group.broadcast([self._view(memory.address, memory.nbytes, DType.U8)], options))

    def barrier(self) -> Pending:
        """Complete on no rank before all have come."""
        return Pending(self._group.barrier(self._barrier))

    def send(self, address: int, nbytes: int, to: int) -> Message:
        """At least one byte; the peer receives as many."""
        return Message(self._group.send([tensor(address, nbytes)], to, _TAG))

    def recv(self, address: int, nbytes: int, source: int) -> Message:
        """At least one byte."""
        return Message(self._group.recv([tensor(address, nbytes)], source, _TAG))

    def _view(self, address: int, count: int, dtype: DType) -> torch.Tensor:
        """Kept: else Gloo's thread may be the last to hold it, and would wait for the interpreter to let it go."""
        key = (address, count, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[key] = tensor(*key)
        return view

    def leak(self) -> None:
        """Never to be destroyed: in a forked process, where destroying would join threads that do not exist."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


class Pending:
    """A collective that Gloo's own thread carries out."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> bool:
        """False when ``timeout_s`` passed first. Raises RuntimeError where it failed."""
        if self._work is None:
            return True
        try:
            self._work.wait(timedelta(seconds=max(1e-3, min(timeout_s, 1e6))))  # 0 would be for ever
        except RuntimeError:
            if not self._work.is_completed():
                return False
            work, self._work = self._work, None
            try:
                work.wait()  # at once: it has failed, or was complete a moment too late
            finally:
                del work  # it holds the group's connections, and an error's traceback would hold it
        self._work = None
        return True


class Message:
    """A message on its way. Waiting has no deadline: one that passes would break all of the group's connections."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Once, until it is gone, or here. Raises RuntimeError where it was lost."""
        work, self._work = self._work, None
        try:
            if not work.wait(_FOREVER):
                raise RuntimeError("a message was given up")
        finally:
            del work  # as above
