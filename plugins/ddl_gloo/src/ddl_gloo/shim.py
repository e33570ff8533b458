"""The only file that calls torch's names for Gloo and knows their pitfalls.

It uses the names that torch 2.13 to 2.15 have in common. Version 2.15 renames some of the others (``_allgather_base``,
``_reduce_scatter_base``, ``alltoall_base``); their work is done here by ``send`` and ``recv``.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddlcore.types import Buffer, DType, ReduceOp

# The torch types and ops by which Gloo reduces ddl's types. Gloo has no 16-bit integers, and adds 16-bit floats in 16
# bits. It finds the minimum and maximum of floats by comparing, so it depends on the order of the ranks whether a NaN
# is lost.
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

_FOREVER = timedelta(days=365)  # a slow peer is not an error; only an abort ends a wait
_VIEWS = 64  # tensors kept by address, because the same fusion buffers are used in every step
_TAG = 0  # one tag for all messages: between two ranks they arrive in the order of sending


def tensor(address: int, count: int, dtype: DType = DType.U8) -> torch.Tensor:
    """Return a one-dimensional tensor of at least one element on the memory at ``address``.

    The caller keeps the memory's owner alive.
    """
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=_TYPES[dtype])


class Group:
    """The ranks of one communicator, all connected to each other. Only one thread may call it at a time."""

    def __init__(self, store: Any, rank: int, size: int, address: str, timeout_s: float) -> None:
        """Listen at ``address``, an address of this host, and connect to the other ranks within ``timeout_s``.

        Ranks tell each other their addresses by ``store``. Raises RuntimeError, and the errors of the store.
        """
        if not dist.is_gloo_available():
            raise RuntimeError("this torch was built without Gloo; pip install torch")
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # gloo.Options is a different class
        # With lazy connections, Gloo would wait forever for a peer that dies before the first collective.
        options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
        options._threads = 2  # Gloo's default; with one thread, successive calls take up to 1.7 times as long
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
        """Start an allreduce in place. Type and op must be in NATIVE, and there must be at least one element."""
        options = self._reductions[(_OF_BOOL if memory.dtype is DType.BOOL else _OPS)[op]]
        return Pending(self._group.allreduce([self._view(memory.address, memory.count, memory.dtype)], options))

    def broadcast(self, memory: Buffer, root: int) -> Pending:
        """Start a broadcast in place, of at least one byte."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = _FOREVER
        return Pending(self._group.broadcast([self._view(memory.address, memory.nbytes, DType.U8)], options))

    def barrier(self) -> Pending:
        """Start a barrier, which completes on no rank before all ranks have called it."""
        return Pending(self._group.barrier(self._barrier))

    def send(self, address: int, nbytes: int, to: int) -> Message:
        """Start sending at least one byte; the peer must receive the same number of bytes."""
        return Message(self._group.send([tensor(address, nbytes)], to, _TAG))

    def recv(self, address: int, nbytes: int, source: int) -> Message:
        """Start receiving at least one byte from rank ``source``."""
        return Message(self._group.recv([tensor(address, nbytes)], source, _TAG))

    def _view(self, address: int, count: int, dtype: DType) -> torch.Tensor:
        """Return a tensor on the memory at ``address``, and keep it for later calls.

        If the tensor were not kept, Gloo's thread might hold its last reference, and releasing that would have to wait
        for the interpreter's lock.
        """
        key = (address, count, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[key] = tensor(*key)
        return view

    def leak(self) -> None:
        """Keep the group from ever being destroyed.

        To destroy it would join its threads. These do not exist in a forked process, and may never end after an abort.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


class Pending:
    """A collective that Gloo's own thread carries out."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> bool:
        """Wait until the collective is complete and return True, or return False after ``timeout_s``.

        Raises RuntimeError if the collective failed.
        """
        if self._work is None:
            return True
        try:
            self._work.wait(timedelta(seconds=max(1e-3, min(timeout_s, 1e6))))  # 0 would mean no deadline
        except RuntimeError:
            if not self._work.is_completed():
                return False
            work, self._work = self._work, None
            try:
                work.wait()  # returns immediately: it has failed, or has completed since
            finally:
                del work  # otherwise an error's traceback keeps it, and thereby the group's connections
        self._work = None
        return True


class Message:
    """A message in flight.

    Waiting for it has no deadline, because a deadline that passes would break all of the group's connections.
    """

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait until the message is sent or received; call it only once.

        Raises RuntimeError if the message was lost.
        """
        work, self._work = self._work, None
        try:
            if not work.wait(_FOREVER):
                raise RuntimeError("a message was given up")
        finally:
            del work  # as in Pending.wait
