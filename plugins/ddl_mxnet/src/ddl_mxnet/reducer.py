"""Sums gradients over the ranks while MXNet's engine still computes others; knows no optimizer and no trainer.

The path of one gradient: a fence in MXNet's engine opens when no operator reads or writes the gradient any more. The
thread that trains waits for the fences one by one, in the order in which backward reaches them, and submits each
gradient in place. At the end it waits for all of them. Meanwhile the engine computes, and buckets are in flight.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from ddl_mxnet.adapter import MxnetAdapter, apart, overlapping
from ddl_mxnet.devices import is_on_gpu, on_host
from ddl_mxnet.engine import Pushed, is_naive
from ddlcore.api import (
    Operations,
    ProcessSet,
    UserCompressor,
    Waitable,
    check_predivide,
    current_job,
    membership,
    wait_for_all,
)
from ddlcore.api.arrays import allgather_async
from ddlcore.contracts import JobService, PersistentRequest, RequestStart
from ddlcore.errors import DdlInternalError
from ddlcore.types import Sum

Named = Sequence[tuple[str, Any]]

FENCE_BYTES = 128 << 10  # small gradients share a fence: a fence for each would cost more than their sums
# A fence must run some C function that does nothing. ``abs`` takes its argument for a number and touches no memory.
NOTHING = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
PRIORITIZED = ctypes.byref(ctypes.c_int(3))  # FnProperty::kCPUPrioritized: other threads than those of operators
CPU_CONTEXT = (ctypes.c_int32 * 2)(1, 0)  # mxnet::Context: cpu(0)
# Not EngineOperations: this module waits for the arrays itself, so MXNet's engine need not know of the collectives.
OPERATIONS = Operations(MxnetAdapter())


@dataclass(frozen=True)
class Reduction:
    """How all gradients of one optimizer are summed."""

    predivide: float  # gradients are divided by it before the sum, and the optimizer multiplies by it
    compression: str
    user_compressor: UserCompressor | None
    num_groups: int
    process_set: ProcessSet

    def __post_init__(self) -> None:
        check_predivide(self.predivide)
        if isinstance(self.num_groups, bool) or not isinstance(self.num_groups, int) or self.num_groups < 0:
            raise ValueError(f"num_groups must be a whole number, 0 or more, not {self.num_groups!r}")


class Slot:
    """One gradient: its array, MXNet's handle of the array, and the persistent request that sums it in every step."""

    __slots__ = ("array", "exact", "handle", "name", "request")

    def __init__(self, name: str, array: Any, exact: bool) -> None:
        self.name = name  # the name under which it is reduced
        self.array = array
        self.exact = exact  # summed without predivision and without compression
        self.handle = array.handle
        self.request: PersistentRequest | None = None


class Fence:
    """An empty operation of MXNet's engine by which this thread can wait for several gradients at once."""

    __slots__ = ("arguments", "first", "slots")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.first = slots[0].handle
        arrays = apart([slot.array for slot in slots])
        handles = (ctypes.c_void_p * len(arrays))(*(array.handle.value for array in arrays))
        self.arguments = (NOTHING, None, None, CPU_CONTEXT, None, 0, handles, len(arrays), PRIORITIZED, 0, b"ddl_fence")

    def push(self) -> None:
        """Queue the fence: it opens after all work on its arrays that the engine knows of now, reads included."""
        check_call(_LIB.MXEnginePushSyncND(*self.arguments))

    def wait(self) -> None:
        """Wait until the fence is open. Raises the errors of MXNet's operators."""
        check_call(_LIB.MXNDArrayWaitToRead(self.first))


class Plan:
    """Arrays that are reduced together in every step, in the given order. All ranks must use the same names."""

    def __init__(self, gradients: Named, exact: Named = ()) -> None:
        """Plan the reduction of ``gradients``, and of ``exact``: arrays that are summed without factor or compression.

        Raises ValueError for a gradient that is neither dense nor row_sparse.
        """
        self.sparse = [(name, array) for name, array in gradients if array.stype != "default"]
        strange = [f"{name} ({array.stype})" for name, array in self.sparse if array.stype != "row_sparse"]
        if strange:
            raise ValueError(f"gradients are dense or row_sparse; not so {', '.join(strange)}")
        self.staged: list[tuple[Any, Any]] = []  # (gradient, the copy that is reduced instead of it)
        self.exact = [Slot(name, array, True) for name, array in exact]
        dense = [(name, array) for name, array in gradients if array.stype == "default"]
        here = [place for place, (_, array) in enumerate(dense) if not is_on_gpu(array)]
        # Gradients are summed in place, so memory that two of them share would be summed twice. Each of them is copied.
        shared = {here[i] for i in overlapping([dense[place][1] for place in here])}
        self.dense = [Slot(name, self._reached(array, i in shared), False) for i, (name, array) in enumerate(dense)]
        self.fences = [Fence(slots) for slots in _shares([*self.exact, *self.dense])]

    def _reached(self, array: Any, shared: bool) -> Any:
        """Return the array to reduce: the gradient itself, or a copy if it is on a GPU or shares memory."""
        if is_on_gpu(array):
            self.staged.append((array, on_host(array)))
        elif shared:
            self.staged.append((array, array.copy()))
        else:
            return array
        return self.staged[-1][1]


class Reducer:
    """Sums all gradients of one optimizer. Only the thread that trains uses it.

    A reducer belongs to the job that was current when it was created. After ``shutdown()`` and another ``init()`` it
    switches to the new job at the next step, and needs new plans.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        # Whether a step has sent gradients and has not ended. If the next step finds it true, an exception has
        # interrupted that step: a signal handler raised, or an operator of MXNet failed. Then this rank cannot know
        # which of its gradients the peers have received.
        self.torn = False
        self._in_flight: list[Any] = []  # the persistent requests in flight, or handles
        self.bind()

    def bind(self) -> None:
        """Bind the reducer to the current job.

        Raises NotInitialized if there is no current job, and ValueError if the process set is not registered.
        """
        self.job: JobService = current_job()
        ranks, self.active = membership(self.job, self.reduction.process_set)
        self.members = len(ranks)

    def rebind(self) -> bool:
        """Switch to the current job if the old one has ended; return whether it did."""
        if not self.job.closed:
            return False
        self._in_flight, self.torn = [], False
        self.__dict__.pop("label", None)
        self.bind()
        return True

    @cached_property
    def label(self) -> str:
        """The prefix of the gradients' names, which differs between the optimizers of a job.

        It is computed in the optimizer's first reduction, because all members run first reductions in the same order,
        while they may create their optimizers in different orders.
        """
        before = self.job.next_ordinal(f"gradients.{self.reduction.process_set.process_set_id}")
        return f"gradient[{before}]." if before else "gradient."  # a "[" after "gradient" marks the later optimizers

    @property
    def scale(self) -> float:
        """The factor that turns a sum into the mean over the members; 1 if this rank sums nothing."""
        return self.reduction.predivide / self.members if self.active else 1.0

    def require_whole(self) -> None:
        """End the job if the previous step was torn, so that no rank continues with other values than its peers.

        Raises DdlInternalError on this rank. The peers, which wait or will wait for this rank, raise PeerLost with the
        same text.
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
        """Return a context that marks the step as torn if an exception leaves it.

        Two kinds of exceptions do not: a DdlInternalError, because the job itself has failed, and ``harmless`` ones.
        """
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
        """Replace every gradient by its sum over the members. All members must call it once per step.

        Waits until all operations have ended, then raises the first error: PeerLost, MismatchError or another
        DdlInternalError. After an interrupt that came before anything was sent it may be called again; after a later
        interrupt the next call ends the job. ``torn`` stays true until the caller clears it, because only the caller
        knows when the step (the update, for example) is complete.
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
        except DdlInternalError:  # the job has failed, so there is nothing left to protect
            self.torn, self._in_flight = False, []
            raise
        except BaseException:
            self._shelter(plan)
            raise
        if failure is not None:
            self.torn = False
            raise failure

    def _reduce_in_place(self, plan: Plan) -> Exception | None:
        """Sum all gradients in place by persistent requests; return the first error.

        This runs in every step for hundreds of gradients, so each costs one call of MXNet and few lines of Python. If
        buckets do not overlap with computing, all requests are started together, and this thread runs their bucket.
        """
        started: list[RequestStart] = []
        address, data_of = ctypes.c_void_p(), _LIB.MXNDArrayGetData
        into = ctypes.byref(address)
        overlaps = self.job.overlaps
        for fence in plan.fences:
            fence.wait()
            for slot in fence.slots:
                request = slot.request
                if request is None:
                    request = slot.request = self._describe(slot)
                if data_of(slot.handle, into) != 0:  # this also converts a layout of oneDNN to the usual one
                    check_call(-1)
                started.append((request, address.value or 0, slot.array))
            if overlaps:
                self._start(started, False)
                started = []
        self._start(started, True)
        return self._land()

    def _start(self, started: Sequence[RequestStart], waits: bool) -> None:
        self.torn = True
        self._in_flight += [request for request, _, _ in started]
        if started:
            self.job.start_all(started, waits)

    def _describe(self, slot: Slot) -> PersistentRequest:
        return OPERATIONS.persistent_allreduce(
            slot.array,
            name=slot.name,
            op=Sum,
            prescale_factor=1.0 if slot.exact else 1.0 / self.reduction.predivide,
            compression="none" if slot.exact else self.reduction.compression,
            process_set=self.reduction.process_set,
            job=self.job,
        )

    def _land(self) -> Exception | None:
        """Wait for all requests in flight and return the first error.

        It waits for the last one first: when that has ended, most of the others have ended too.
        """
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
        """Prevent MXNet from writing gradients that are still in flight, because peers read them.

        An exception has interrupted the step, and the user may catch it and start another backward pass. An operation
        in MXNet's engine therefore holds the gradients until the requests have ended; this method does not wait.
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
        """Sum gradients in groups, or with a compressor of the user's own; return the first error."""
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
        results, failure = wait_for_all(handles)
        self._in_flight = []
        if failure is None:
            for result, land in zip(results, landing, strict=True):
                land(result)
        return failure

    def _reduce_sparse(self, plan: Plan) -> Exception | None:
        """Gather the rows of sparse gradients and add them up on every rank, in rank order; return the first error."""
        self.torn = True
        gather = partial(allgather_async, process_set=self.reduction.process_set)
        handles = []
        for name, array in plan.sparse:
            handles.append(gather(array.indices.asnumpy(), name=f"{name}.rows"))
            handles.append(gather(array.data.asnumpy(), name=f"{name}.values"))
        results, failure = wait_for_all(handles)
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
    """Divide slots into runs of neighbours of up to FENCE_BYTES each; a larger slot is alone."""
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
    """Divide slots into ``parts`` groups of neighbours whose sizes differ by at most one; leave out empty groups."""
    each, more = divmod(len(slots), parts) if parts else (0, 0)
    left = iter(slots)
    groups = [list(islice(left, each + (i < more))) for i in range(parts)]
    return [group for group in groups if group]


def _leave(_: Any) -> None:
    """Do nothing with a result that is already in place."""


def _unpack(compressor: UserCompressor | None, contexts: Sequence[Any], arrays: Sequence[Any], sums: Any) -> None:
    if compressor is not None:
        for array, ctx, total in zip(arrays, contexts, sums, strict=True):
            compressor.decompress(total, ctx).copyto(array)


def _wait_for(in_flight: Sequence[Any]) -> None:
    """Wait until all requests have ended, with or without an error."""
    for request in in_flight:
        with suppress(Exception):
            request.wait()
