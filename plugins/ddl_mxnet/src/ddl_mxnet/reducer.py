"""Sums gradients over the ranks while MXNet's engine still computes others; knows no optimizer and no trainer.

The path of one gradient: a fence in MXNet's engine opens when nothing writes or reads it any more; the thread
that trains waits for the fences one by one, in the order in which backward comes by, and submits the gradient in
place; at last it waits for all. So the engine computes, and buckets travel, while it waits.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from ddl_mxnet.adapter import MxnetAdapter, apart, overlapping
from ddl_mxnet.devices import is_on_gpu, on_host
from ddl_mxnet.engine import Pushed, is_naive
from ddlcore.api import Operations, ProcessSet, UserCompressor, Waitable, current_job, global_process_set
from ddlcore.api.arrays import allgather_async
from ddlcore.errors import DdlInternalError
from ddlcore.types import Sum

__all__ = ["Fence", "Plan", "Reducer", "Reduction", "Slot"]

Named = Sequence[tuple[str, Any]]

FENCE_BYTES = 128 << 10  # small gradients share a fence: one of their own each would cost more than their sums
# What a fence runs is nothing: any function of C that takes what it is given for numbers and touches no memory.
NOTHING = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
PRIORITIZED = ctypes.byref(ctypes.c_int(3))  # FnProperty::kCPUPrioritized: threads of their own, not those of operators
CPU_CONTEXT = (ctypes.c_int32 * 2)(1, 0)  # mxnet::Context: cpu(0)
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

    __slots__ = ("array", "exact", "handle", "name", "request")

    def __init__(self, name: str, array: Any, exact: bool) -> None:
        self.name = name  # on the wire
        self.array = array
        self.exact = exact  # summed as it is, by neither factor nor compression
        self.handle = array.handle
        self.request: Any = None


class Fence:
    """Gradients that MXNet's engine is asked about together."""

    __slots__ = ("arguments", "first", "slots")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.first = slots[0].handle
        arrays = apart([slot.array for slot in slots])
        handles = (ctypes.c_void_p * len(arrays))(*(array.handle.value for array in arrays))
        self.arguments = (NOTHING, None, None, CPU_CONTEXT, None, 0, handles, len(arrays), PRIORITIZED, 0, b"ddl_fence")

    def push(self) -> None:
        """Opens behind all work on these arrays that the engine knows of now, reading included."""
        check_call(_LIB.MXEnginePushSyncND(*self.arguments))

    def wait(self) -> None:
        """Until it is open. Raises what MXNet's operators have raised."""
        check_call(_LIB.MXNDArrayWaitToRead(self.first))


class Plan:
    """Arrays that are reduced together in every step, in the order in which they stand. All ranks have the same names."""

    def __init__(self, gradients: Named, exact: Named = ()) -> None:
        """``exact``: arrays beside them that are summed as they are. ValueError for a storage that is no gradient's."""
        self.sparse = [(name, array) for name, array in gradients if array.stype != "default"]
        strange = [f"{name} ({array.stype})" for name, array in self.sparse if array.stype != "row_sparse"]
        if strange:
            raise ValueError(f"gradients are dense or row_sparse; not so {', '.join(strange)}")
        self.staged: list[tuple[Any, Any]] = []  # (an array, what is reduced in place of it) of what goes that way
        self.exact = [Slot(name, array, True) for name, array in exact]
        dense = [(name, array) for name, array in gradients if array.stype == "default"]
        here = [place for place, (_, array) in enumerate(dense) if not is_on_gpu(array)]
        # What two gradients share would be summed twice, in place: the sums of sums. Each of them has memory of its own.
        shared = {here[i] for i in overlapping([dense[place][1] for place in here])}
        self.dense = [Slot(name, self._reached(array, i in shared), False) for i, (name, array) in enumerate(dense)]
        self.fences = [Fence(slots) for slots in _shares([*self.exact, *self.dense])]

    def _reached(self, array: Any, shared: bool) -> Any:
        """The array, or what stands for one of a GPU, or for one that shares memory with another."""
        if is_on_gpu(array):
            self.staged.append((array, on_host(array)))
        elif shared:
            self.staged.append((array, array.copy()))
        else:
            return array
        return self.staged[-1][1]


# By job and process set, how many optimizers have begun to reduce gradients.
_begun: WeakKeyDictionary[Any, dict[int | None, Iterator[int]]] = WeakKeyDictionary()


class Reducer:
    """All gradients of one optimizer. Used by the thread that trains.

    It holds the job that was current when it was made. After ``shutdown()`` and another ``init()`` it goes over
    to the new one at the next step, and wants new plans.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        # Whether a step has begun that is not over. Found so by the next one, it was torn by an exception in its midst:
        # a signal's handler, or an operator of MXNet's that failed. Then nobody knows what the peers have of it.
        self.torn = False
        self._in_flight: list[Any] = []  # persistent allreduce under way
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

    def rebind(self) -> bool:
        """Goes over to the job that is current now, where the one it had is over; whether it did."""
        if not self.job.closed:
            return False
        self._in_flight, self.torn = [], False
        self.__dict__.pop("label", None)
        self.bind()
        return True

    @cached_property
    def label(self) -> str:
        """What gradients' names begin with: two optimizers must not share names, though they may call them alike.

        It is first asked for in the first reduction, whose order is the same on all members; that in which
        optimizers were made need not be.
        """
        before = next(_begun.setdefault(self.job, {}).setdefault(self.reduction.process_set.process_set_id, count()))
        return f"gradient[{before}]." if before else "gradient."  # no name in the first one's begins so

    @property
    def scale(self) -> float:
        """What the optimizer multiplies a sum by, to have the mean of the members. 1 where nothing is summed."""
        return self.reduction.predivide / self.members if self.active else 1.0

    def require_whole(self) -> None:
        """Ends the job where the step before was torn, so that no rank goes on with other values than its peers.

        Raises DdlInternalError here; the peers, which wait or will wait for this rank, raise PeerLost with the same text.
        """
        if self.torn:
            text = (
                f"an exception has interrupted a step on rank {self.job.rank} after it had sent gradients off, so that "
                "it cannot be made again; let the handler end the process, or call init() again and load a checkpoint"
            )
            self.job.shutdown(text)
            raise DdlInternalError(text)

    @contextmanager
    def in_one(self, harmless: type[Exception] = DdlInternalError) -> Iterator[None]:
        """What is done within is done whole, or has torn the step: but for errors of the job's own, and of the ``harmless`` kind."""
        if not self.active:
            yield
            return
        self.require_whole()
        self.torn = True
        try:
            yield
        except (DdlInternalError, harmless):
            self.torn = False
            raise
        self.torn = False

    def reduce(self, plan: Plan) -> None:
        """Every gradient becomes the sum over the members. All of them call it, once a step.

        Raises the first error of any, when all are over: PeerLost, MismatchError and their kin. If it is interrupted
        before it has sent anything, it may be called again; if after that, the next call ends the job. The step is
        ``torn`` till the caller, who knows what else belongs to it, says otherwise.
        """
        self.require_whole()
        for there, here in plan.staged:
            there.copyto(here)
        for fence in plan.fences:
            fence.push()
        try:
            if self.reduction.num_groups or self.reduction.user_compressor is not None:
                failure = self._reduce_otherwise(plan)
            else:
                failure = self._reduce_in_place(plan)
            if failure is None:
                for there, here in plan.staged:
                    here.copyto(there)
                failure = self._reduce_sparse(plan) if plan.sparse else None
        except DdlInternalError:  # what has become of the job, which takes nothing any more
            self.torn, self._in_flight = False, []
            raise
        except BaseException:
            self._shelter(plan)
            raise
        if failure is not None:
            self.torn = False
            raise failure

    def _reduce_in_place(self, plan: Plan) -> Exception | None:
        """Runs once a step, for hundreds of gradients: each costs one call of MXNet and a line of ddl's.

        Where nothing travels while the step computes, all go off together, and this thread runs their bucket itself.
        """
        started: list[tuple[Any, int, Any]] = []
        address, data_of = ctypes.c_void_p(), _LIB.MXNDArrayGetData
        into = ctypes.byref(address)
        overlaps = self.job.overlaps
        for fence in plan.fences:
            fence.wait()
            for slot in fence.slots:
                request = slot.request
                if request is None:
                    request = slot.request = self._describe(slot)
                if data_of(slot.handle, into) != 0:  # it makes the layout MXNet's usual one, too
                    check_call(-1)
                started.append((request, address.value or 0, slot.array))
            if overlaps:
                self._start(started, False)
                started = []
        self._start(started, True)
        return self._land()

    def _start(self, started: Sequence[tuple[Any, int, Any]], waits: bool) -> None:
        self.torn = True
        self._in_flight += [request for request, _, _ in started]
        if started:
            self.job.start_all(started, waits)

    def _describe(self, slot: Slot) -> Any:
        request = OPERATIONS.persistent_allreduce(
            slot.array,
            name=slot.name,
            op=Sum,
            prescale_factor=1.0 if slot.exact else 1.0 / self.reduction.predivide,
            compression="none" if slot.exact else self.reduction.compression,
            process_set=self.reduction.process_set,
            job=self.job,
        )
        request.source.wait = None  # a fence sees to it
        return request

    def _land(self) -> Exception | None:
        """Waits for all that is under way, the last first: by then most of the others are over. The first error."""
        failure: Exception | None = None
        in_flight = self._in_flight
        while in_flight:
            try:
                in_flight[-1].wait()
            except DdlInternalError as error:
                failure = failure or error
            in_flight.pop()
        return failure

    def _shelter(self, plan: Plan) -> None:
        """Keeps MXNet from writing gradients that are under way still, which peers read: until that is over.

        The exception goes on to the user meanwhile, who may compute others.
        """
        in_flight, self._in_flight = self._in_flight, []
        if not any(request.pending for request in in_flight):
            return
        if is_naive():
            _wait_for(in_flight)
            return

        def begin() -> None:
            threading.Thread(target=end, name="ddl-mxnet-shelter", daemon=True).start()

        def end() -> None:
            _wait_for(in_flight)
            guard.end()

        guard = Pushed((), [slot.array for fence in plan.fences for slot in fence.slots], begin)
        guard.push()

    def _reduce_otherwise(self, plan: Plan) -> Exception | None:
        """In groups, or by a compressor of the user's own."""
        self.torn = True
        reduce: Callable[..., Waitable] = partial(
            OPERATIONS.grouped_allreduce_async, op=Sum, process_set=self.reduction.process_set, job=self.job
        )
        handles = self._in_flight
        for slot in plan.exact:
            handles.append(reduce([slot.array], outputs=[slot.array], name=slot.name))
        landing: list[Callable[[Any], None]] = [_leave] * len(handles)
        compressor = self.reduction.user_compressor
        for group in _split(plan.dense, self.reduction.num_groups or len(plan.dense)):
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
            handles.append(handle)
            landing.append(partial(_unpack, compressor, [ctx for _, ctx in packed], arrays))
        results, failure = _results(handles)
        self._in_flight = []
        if failure is None:
            for result, land in zip(results, landing, strict=True):
                land(result)
        return failure

    def _reduce_sparse(self, plan: Plan) -> Exception | None:
        """Rows and their values are gathered; every rank adds them up, in rank order."""
        self.torn = True
        gather = partial(allgather_async, process_set=self.reduction.process_set)
        handles = []
        for name, array in plan.sparse:
            handles.append(gather(array.indices.asnumpy(), name=f"{name}.rows"))
            handles.append(gather(array.data.asnumpy(), name=f"{name}.values"))
        results, failure = _results(handles)
        if failure is not None:
            return failure
        for (_, array), rows, values in zip(plan.sparse, results[::2], results[1::2], strict=True):
            unique, places = np.unique(rows, return_inverse=True)
            summed = np.zeros((len(unique), *array.shape[1:]), np.promote_types(values.dtype, np.float32))
            np.add.at(summed, places, values / self.reduction.predivide)
            made = mx.nd.sparse.zeros("row_sparse", array.shape, dtype=array.dtype)
            if len(unique):
                made = mx.nd.sparse.row_sparse_array((summed, unique), shape=array.shape, dtype=array.dtype)
            made.copyto(array)
        return None


def _shares(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Neighbours, so many that they have FENCE_BYTES together; a large one is alone."""
    shares: list[list[Slot]] = []
    room = -1
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


def _leave(_: Any) -> None:
    """The result is in place."""


def _unpack(compressor: UserCompressor | None, contexts: Sequence[Any], arrays: Sequence[Any], sums: Any) -> None:
    if compressor is not None:
        for array, ctx, total in zip(arrays, contexts, sums, strict=True):
            compressor.decompress(total, ctx).copyto(array)


def _results(handles: Sequence[Waitable]) -> tuple[list[Any], Exception | None]:
    """Of all, when all are over, and the first error."""
    failure: Exception | None = None
    results = []
    for handle in handles:
        try:
            results.append(handle.wait())
        except DdlInternalError as error:
            failure = failure or error
    return results, failure


def _wait_for(in_flight: Sequence[Any]) -> None:
    """Until all are over, one way or the other."""
    for request in in_flight:
        with suppress(Exception):
            request.wait()
