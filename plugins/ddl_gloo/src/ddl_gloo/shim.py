"""Calls to Gloo through torch. No other file of this plugin uses torch's names for Gloo.

Only names that exist in torch 2.13, 2.14 and 2.15 are used. Torch 2.15 renames some methods (``_allgather_base``,
``_reduce_scatter_base``, ``alltoall_base``). In place of these methods, this plugin uses ``send`` and ``recv``.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddlcore.types import Buffer, DType, ReduceOp

# The torch types and ops by which Gloo reduces ddl's types. Gloo has no 16-bit integers, and adds 16-bit floats in 16
# bits. Gloo finds the minimum and maximum of floats by comparisons, so a NaN may be lost, depending on the order of the
# ranks.
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
_VIEWS = 64  # at most so many tensors are stored by address, because every step uses the same fusion buffers
_TAG = 0  # one tag for all messages: messages from one rank to another arrive in the order of sending


def tensor(address: int, count: int, dtype: DType = DType.U8) -> torch.Tensor:
    """Return a one-dimensional tensor that uses the memory at ``address``. ``count`` must be at least 1.

    The caller must keep the owner of the memory alive.
    """
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=_TYPES[dtype])


class GlooGroup:
    """Gloo's object for the ranks of one communicator, all connected to each other.

    Only one thread at a time may call the methods.
    """

    def __init__(self, store: Any, rank: int, size: int, address: str, timeout_s: float) -> None:
        """Listen at ``address``, an address of this host, and connect to the other ranks within ``timeout_s`` seconds.

        The ranks exchange their addresses through ``store``. Raises RuntimeError if the ranks cannot connect. Errors of
        the store are passed on.
        """
        if not dist.is_gloo_available():
            raise RuntimeError("this torch was built without Gloo; pip install torch")
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # gloo.Options is a different class
        # With lazy connections, Gloo would wait forever for a rank that dies before the first collective.
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
        """Start an allreduce of ``memory`` in place.

        The pair of the memory's type and ``op`` must be in NATIVE, and ``memory`` must have at least one element.
        """
        options = self._reductions[(_OF_BOOL if memory.dtype is DType.BOOL else _OPS)[op]]
        return Pending(self._group.allreduce([self._view(memory.address, memory.count, memory.dtype)], options))

    def broadcast(self, memory: Buffer, root: int) -> Pending:
        """Start a broadcast of ``memory`` from rank ``root``, in place. ``memory`` has at least one byte."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = _FOREVER
        return Pending(self._group.broadcast([self._view(memory.address, memory.nbytes, DType.U8)], options))

    def barrier(self) -> Pending:
        """Start a barrier. It completes only after all ranks have called this method."""
        return Pending(self._group.barrier(self._barrier))

    def send(self, address: int, nbytes: int, to: int) -> Message:
        """Start to send ``nbytes`` bytes (at least one) at ``address`` to rank ``to``.

        The other rank must receive the same number of bytes.
        """
        return Message(self._group.send([tensor(address, nbytes)], to, _TAG))

    def recv(self, address: int, nbytes: int, source: int) -> Message:
        """Start to receive ``nbytes`` bytes (at least one) from rank ``source`` into the memory at ``address``."""
        return Message(self._group.recv([tensor(address, nbytes)], source, _TAG))

    def _view(self, address: int, count: int, dtype: DType) -> torch.Tensor:
        """Return a tensor that uses the memory at ``address``, and store the tensor for later calls.

        If the tensor were not stored, Gloo's thread might have the last reference to it. To release this reference, the
        thread would have to wait for the GIL.
        """
        key = (address, count, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[key] = tensor(*key)
        return view

    def leak(self) -> None:
        """Make sure that Gloo's group is never destroyed.

        The group's destructor waits for the end of the group's threads. In a forked process these threads do not exist,
        and after an abort they may never end.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


class Pending:
    """A collective in flight, which runs in a thread of Gloo."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> bool:
        """Wait until the collective is complete, and return True. Return False after ``timeout_s`` seconds.

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
                work.wait()  # returns or raises immediately, because the collective has completed or failed
            finally:
                del work  # otherwise the traceback of an error would keep it, and so the group's connections
        self._work = None
        return True


class Message:
    """A message in flight.

    The wait for a message has no deadline, because Gloo breaks all connections of the group if a deadline passes.
    """

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait until the message is sent or received. Call this method only once.

        Raises RuntimeError if the message was lost.
        """
        work, self._work = self._work, None
        try:
            if not work.wait(_FOREVER):
                raise RuntimeError("a message was given up")
        finally:
            del work  # as in Pending.wait
