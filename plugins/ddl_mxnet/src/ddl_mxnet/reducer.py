"""Sums gradients over the ranks while MXNet's engine still computes others; knows no optimizer and no trainer.

The path of one gradient: a fence in MXNet's engine opens when nothing writes or reads it any more; the thread
that trains waits for the fences one by one, in the order in which backward comes by, and submits the gradient in
place; at last it waits for all. So the engine computes, and batches travel, while it waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from ddl_mxnet.adapter import MxnetAdapter
from ddlcore.api import Operations, ProcessSet, UserCompressor, Waitable, current_job, global_process_set
from ddlcore.api.arrays import allgather_async
from ddlcore.errors import NotInitialized
from ddlcore.types import Sum

__all__ = ["Fence", "Reducer", "Reduction", "Slot"]

Named = Sequence[tuple[str, Any]]

FENCE_BYTES = 128 << 10  # small gradients share a fence: one of their own each would cost more than their sums
# What a fence runs is nothing: any function of C that takes what it is given for numbers and touches no memory.
NOTHING = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
PRIORITIZED = 3  # FnProperty::kCPUPrioritized: by threads of their own, so that fences never stand behind operators
# Plain ones: what goes on from here is awaited here, and never by MXNet's engine.
OPERATIONS = Operations(MxnetAdapter())


@dataclass(frozen=True)
class Reduction:
    """How every gradient is summed."""

    predivide: float  # gradients are divided by it before the sum, and the optimizer multiplies by it
    compression: str
    user_compressor: UserCompressor | None
    num_groups: int
    process_set: ProcessSet

    def __post_init__(self) -> None:
        if self.predivide <= 0:
            raise ValueError(f"gradient_predivide_factor must be greater than 0, not {self.predivide}")
        if isinstance(self.num_groups, bool) or not isinstance(self.num_groups, int) or self.num_groups < 0:
            raise ValueError(f"num_groups must be a whole number, 0 or more, not {self.num_groups!r}")


class Slot:
    """One gradient: its array, what the engine calls that, and the allreduce that it has in every step."""

    __slots__ = ("array", "handle", "name", "recurring")

    def __init__(self, name: str, array: Any) -> None:
        self.name = name  # on the wire
        self.array = array
        self.handle = array.handle
        self.recurring: Any = None


class Fence:
    """Gradients that MXNet's engine is asked about together."""

    __slots__ = ("first", "handles", "slots")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.handles = (ctypes.c_void_p * len(slots))(*(slot.handle.value for slot in slots))
        self.first = slots[0].handle

    def push(self, context: Any) -> None:
        """Opens behind all work on these arrays that the engine knows of now, reading included."""
        check_call(
            _LIB.MXEnginePushSyncND(
                NOTHING,
                None,
                None,
                context,
                None,
                0,
                self.handles,
                len(self.handles),
                ctypes.byref(ctypes.c_int(PRIORITIZED)),
                0,
                b"ddl_fence",
            )
        )


class Reducer:
    """All gradients of one optimizer. Used by the thread that trains.

    It holds the job that was current when it was made. After ``shutdown()`` and another ``init()`` it goes over
    to the new one at the next step.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self._dense: list[Slot] = []
        self._exact: list[Slot] = []
        self._sparse: list[tuple[str, Any]] = []
        self._fences: list[Fence] = []
        self._address = ctypes.c_void_p()
        self._context = (ctypes.c_int32 * 8)(1)  # mxnet::Context: of type cpu, with device 0
        self.bind()

    def bind(self) -> None:
        """Belongs to the current job from now on. Raises NotInitialized where there is none, ValueError for the set."""
        self.job = current_job()
        process_set = self.reduction.process_set
        if process_set.process_set_id is None:
            raise ValueError(f"{process_set} is not registered; pass it to init() or add_process_set() first")
        members = range(self.job.size) if process_set is global_process_set else process_set.ranks
        self.members = len(members)
        self.active = self.job.rank in members and self.members > 1
        for slot in (*self._dense, *self._exact):
            slot.recurring = None

    def rebind(self) -> bool:
        """Goes over to the job that is current now, where the one it had is over; whether it did."""
        if not self.job.closed:
            return False
        self.bind()
        return True

    @property
    def scale(self) -> float:
        """What the optimizer multiplies a sum by, to have the mean of the members. 1 where nothing is summed."""
        return self.reduction.predivide / self.members if self.active else 1.0

    # --- what there is to reduce

    def arrange(self, gradients: Named, exact: Named = ()) -> None:
        """Takes these arrays from now on, in the order in which they will stand. All ranks have the same names.

        ``exact``: arrays beside them that are summed as they are, by neither factor nor compression.
        """
        dense = [(name, array) for name, array in gradients if array.stype == "default"]
        self._sparse = [(name, array) for name, array in gradients if array.stype != "default"]
        strange = [f"{name} ({array.stype})" for name, array in self._sparse if array.stype != "row_sparse"]
        if strange:
            raise ValueError(f"gradients are dense or row_sparse; not so {', '.join(strange)}")
        self._dense = [Slot(name, array) for name, array in dense]
        self._exact = [Slot(name, array) for name, array in exact]
        self._fences = [Fence(slots) for slots in _shares([*self._exact, *self._dense])]

    # --- a step

    def reduce(self) -> None:
        """Every gradient becomes the sum over the members. All of them call it, once a step.

        Raises the first error of any, when all are over: PeerLost, MismatchError and their kin.
        """
        if self.job.closed:
            raise NotInitialized("ddl has been shut down; call init() again first")
        for fence in self._fences:
            fence.push(self._context)
        if self.reduction.num_groups or self.reduction.user_compressor is not None:
            self._reduce_otherwise()
        else:
            self._reduce_in_place()
        if self._sparse:
            self._reduce_sparse()

    def _reduce_in_place(self) -> None:
        """Runs hundreds of times a step: a gradient costs two calls of MXNet and one of ddl."""
        again = self.job.again
        address, data_of = self._address, _LIB.MXNDArrayGetData
        into = ctypes.byref(address)
        flying: list[Any] = []
        try:
            for fence in self._fences:
                check_call(_LIB.MXNDArrayWaitToRead(fence.first))
                for slot in fence.slots:
                    recurring = slot.recurring
                    if recurring is None:
                        recurring = self._describe(slot)
                    check_call(data_of(slot.handle, into))
                    again(recurring, address.value or 0, slot.array)
                    flying.append(recurring)
        finally:
            _settle(flying)

    def _describe(self, slot: Slot) -> Any:
        exact = slot in self._exact
        recurring = OPERATIONS.recurring_allreduce(
            slot.array,
            name=slot.name,
            op=Sum,
            prescale_factor=1.0 if exact else 1.0 / self.reduction.predivide,
            compression="none" if exact else self.reduction.compression,
            process_set=self.reduction.process_set,
            job=self.job,
        )
        recurring.source.wait = None  # a fence has seen to it
        slot.recurring = recurring
        return recurring

    def _reduce_otherwise(self) -> None:
        """In groups, or by a compressor of the user's own."""
        for fence in self._fences:
            check_call(_LIB.MXNDArrayWaitToRead(fence.first))
        reduce: Callable[..., Waitable] = partial(
            OPERATIONS.grouped_allreduce_async, op=Sum, process_set=self.reduction.process_set, job=self.job
        )
        flying: list[Waitable] = []
        landing: list[Callable[[Any], None]] = []
        for slot in self._exact:
            flying.append(reduce([slot.array], outputs=[slot.array], name=slot.name))
            landing.append(lambda _: None)
        compressor = self.reduction.user_compressor
        for group in _split(self._dense, self.reduction.num_groups or len(self._dense)):
            arrays = [slot.array for slot in group]
            packed = [(array, None) if compressor is None else compressor.compress(array) for array in arrays]
            sent = [array for array, _ in packed]
            handle = reduce(
                sent,
                outputs=sent if compressor is None else None,
                name=group[0].name if len(group) == 1 else f"group.{group[0].name}",
                prescale_factor=1.0 / self.reduction.predivide,
                compression=self.reduction.compression,
            )
            flying.append(handle)
            landing.append(partial(_unpack, compressor, [ctx for _, ctx in packed], arrays))
        _settle(flying, landing)

    def _reduce_sparse(self) -> None:
        """Rows and their values are gathered; every rank adds them up, in rank order."""
        handles = []
        for name, array in self._sparse:
            rows, values = array.indices.asnumpy(), array.data.asnumpy()
            gather = partial(allgather_async, process_set=self.reduction.process_set)
            handles += [gather(rows, name=f"{name}.rows"), gather(values, name=f"{name}.values")]
        results: list[Any] = []
        _settle(handles, [results.append] * len(handles))
        for i, (_, array) in enumerate(self._sparse):
            rows, where = np.unique(results[2 * i], return_inverse=True)
            values = results[2 * i + 1]
            summed = np.zeros((len(rows), *array.shape[1:]), np.promote_types(values.dtype, np.float32))
            np.add.at(summed, where, values / self.reduction.predivide)
            made = mx.nd.sparse.zeros("row_sparse", array.shape, dtype=array.dtype)
            if len(rows):
                made = mx.nd.sparse.row_sparse_array((summed, rows), shape=array.shape, dtype=array.dtype)
            made.copyto(array)


def _shares(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Neighbours, so many that they have FENCE_BYTES together; a large one is alone."""
    shares: list[list[Slot]] = []
    room = 0
    for slot in slots:
        nbytes = slot.array.size * np.dtype(slot.array.dtype).itemsize
        if nbytes > room:
            shares.append([])
            room = FENCE_BYTES
        shares[-1].append(slot)
        room -= nbytes
    return shares


def _split(slots: Sequence[Slot], parts: int) -> list[list[Slot]]:
    """Neighbours in ``parts`` groups of sizes that differ by one at most; none is empty."""
    each, more = divmod(len(slots), parts) if parts else (0, 0)
    left = iter(slots)
    groups = [list(islice(left, each + (i < more))) for i in range(parts)]
    return [group for group in groups if group]


def _unpack(compressor: UserCompressor | None, contexts: Sequence[Any], arrays: Sequence[Any], sums: Any) -> None:
    if compressor is not None:
        for array, ctx, total in zip(arrays, contexts, sums, strict=True):
            compressor.decompress(total, ctx).copyto(array)


def _settle(flying: Sequence[Any], landing: Sequence[Callable[[Any], None]] = ()) -> None:
    """Waits for all, the last first: by then most of the others are over. Raises the first error."""
    failure: Exception | None = None
    results: list[Any] = [None] * len(flying)
    for i in range(len(flying) - 1, -1, -1):
        try:
            results[i] = flying[i].wait()
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    for land, result in zip(landing, results):
        land(result)
