"""Sums gradients over the ranks while MXNet's engine still computes other gradients.

The steps for one gradient are as follows. This module adds an empty operation, called a fence, to the queue of MXNet's
engine. The engine runs the fence when no earlier operator reads or writes the gradient any more. The thread that trains
waits for the fences one by one, in the order in which backward computes the gradients. After each fence, this thread
submits the gradient to ddl, which sums it in place. At the end, the thread waits for all sums. In the meantime, the
engine computes the other gradients, and buckets are in flight.
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

FENCE_BYTES = 128 << 10  # small gradients share a fence: a fence for each of them would take longer than summing them
# A fence must call a C function that has no effect. ``abs`` reads its argument as a number and accesses no memory.
NOTHING = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
PRIORITIZED = ctypes.byref(ctypes.c_int(3))  # FnProperty::kCPUPrioritized: runs on other threads than operators
CPU_CONTEXT = (ctypes.c_int32 * 2)(1, 0)  # mxnet::Context: cpu(0)
# Not EngineOperations: this module waits for the arrays itself, so MXNet's engine need not know of the collectives.
OPERATIONS = Operations(MxnetAdapter())


@dataclass(frozen=True)
class Reduction:
    """The settings for the sum of all gradients of one optimizer or trainer."""

    predivide: float  # gradients are divided by this before the sum; ``Reducer.scale`` makes up for it
    compression: str
    user_compressor: UserCompressor | None
    num_groups: int
    process_set: ProcessSet

    def __post_init__(self) -> None:
        check_predivide(self.predivide)
        if isinstance(self.num_groups, bool) or not isinstance(self.num_groups, int) or self.num_groups < 0:
            raise ValueError(f"num_groups must be a whole number, 0 or more, not {self.num_groups!r}")


class Slot:
    """One gradient: the array, MXNet's handle of the array, and the request that sums the array in every step.

    The request is a persistent request, which is made at the first step.
    """

    __slots__ = ("array", "exact", "handle", "name", "request")

    def __init__(self, name: str, array: Any, exact: bool) -> None:
        self.name = name  # the name under which it is reduced
        self.array = array
        self.exact = exact  # summed without predivision and without compression
        self.handle = array.handle
        self.request: PersistentRequest | None = None


class Fence:
    """An empty operation of MXNet's engine, which runs when the gradients of all its slots are computed.

    So a thread can wait for one fence instead of several gradients.
    """

    __slots__ = ("arguments", "first", "slots")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.first = slots[0].handle
        arrays = apart([slot.array for slot in slots])
        handles = (ctypes.c_void_p * len(arrays))(*(array.handle.value for array in arrays))
        self.arguments = (NOTHING, None, None, CPU_CONTEXT, None, 0, handles, len(arrays), PRIORITIZED, 0, b"ddl_fence")

    def push(self) -> None:
        """Add the fence to the queue of MXNet's engine, behind all earlier operators that read or write its arrays."""
        check_call(_LIB.MXEnginePushSyncND(*self.arguments))

    def wait(self) -> None:
        """Wait until the fence has run. Then no earlier operator uses the arrays any more.

        If an operator that computes the arrays has failed, its error is raised here.
        """
        check_call(_LIB.MXNDArrayWaitToRead(self.first))


class SumPlan:
    """The arrays that are summed in every step, and the order in which they are summed.

    All ranks must use the same names.
    """

    def __init__(self, gradients: Named, exact: Named = ()) -> None:
        """Make the plan for ``gradients`` and ``exact``, which are both sequences of pairs (name, array).

        The arrays of ``exact`` are summed without predivision and without compression. Raises ValueError for a gradient
        that is neither dense nor row_sparse.
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
        """Return the array to sum for the gradient ``array``: the gradient itself, or a copy.

        A copy is used if the gradient is on a GPU, or if ``shared`` is true: the gradient shares memory with another
        gradient. A pair (gradient, copy) is then added to ``staged``.
        """
        if is_on_gpu(array):
            self.staged.append((array, on_host(array)))
        elif shared:
            self.staged.append((array, array.copy()))
        else:
            return array
        return self.staged[-1][1]


class Reducer:
    """The object that sums all gradients of one optimizer or trainer. Only the thread that trains may use it.

    A reducer belongs to the job that was current when the reducer was created. After ``shutdown()`` and another
    ``init()``, ``rebind`` changes the reducer to the new job. Then new plans must be made.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        # Whether a step has sent gradients and has not ended. If ``torn`` is true when the next step begins, an
        # exception has interrupted the previous step: a signal handler has raised an error, or an operator of MXNet has
        # failed. Then this rank cannot know which of its gradients the peers have received.
        self.torn = False
        self._in_flight: list[Any] = []  # the persistent requests in flight, or handles
        self.bind()

    def bind(self) -> None:
        """Make the reducer use the current job.

        Raises NotInitialized if there is no current job, and ValueError if the process set is not registered in it.
        """
        self.job: JobService = current_job()
        ranks, self.active = membership(self.job, self.reduction.process_set)
        self.members = len(ranks)

    def rebind(self) -> bool:
        """Make the reducer use the current job if the job that it used has ended. Return whether that job had ended."""
        if not self.job.closed:
            return False
        self._in_flight, self.torn = [], False
        self.__dict__.pop("label", None)
        self.bind()
        return True

    @cached_property
    def label(self) -> str:
        """The prefix of the gradients' names. Each optimizer of a job has a different prefix.

        The prefix is chosen at the first reduction of the optimizer, not at its creation: all members run the first
        reductions of their optimizers in the same order, but may create the optimizers in different orders.
        """
        before = self.job.next_ordinal(f"gradients.{self.reduction.process_set.process_set_id}")
        return f"gradient[{before}]." if before else "gradient."  # a "[" after "gradient" marks the later optimizers

    @property
    def scale(self) -> float:
        """The factor that turns a sum of predivided gradients into their mean; 1 on ranks outside the process set."""
        return self.reduction.predivide / self.members if self.active else 1.0

    def require_whole(self) -> None:
        """If ``torn`` is true, end the job and raise DdlInternalError.

        ``torn`` means that an exception interrupted the previous step after the step had sent gradients. The job must
        end, because this rank could continue with other values than the other ranks. The other ranks raise PeerLost
        with the same text when they wait for this rank.
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
        """Return a context manager that sets ``torn`` to true if an exception leaves the ``with`` block.

        Two kinds of exceptions do not set ``torn``: a DdlInternalError, because in this case the job itself has failed,
        and an exception of the type ``harmless``. At the start of the block, the context manager calls
        ``require_whole``. On a rank outside the process set, the context manager does nothing.
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

    def reduce(self, plan: SumPlan) -> None:
        """Replace every gradient of ``plan`` by its sum over the members. All members must call this once per step.

        Waits until all operations have ended. If some have failed, the first error is raised after that: PeerLost,
        MismatchError or another DdlInternalError. Another exception, such as KeyboardInterrupt, may interrupt this
        method. If no gradient was sent before the interruption, this method may be called again. If a gradient was
        sent, the next call ends the job.

        After success, ``torn`` is true. The caller must set it to False when the step is complete, for example after
        the update.
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

    def _reduce_in_place(self, plan: SumPlan) -> Exception | None:
        """Sum all gradients in place by persistent requests. Return the first error, or None.

        This method runs in every step for hundreds of gradients. So, to be fast, the loop makes only one call of MXNet
        for each gradient. If ``overlaps`` of the job is false, the job does not run buckets while the user's thread
        computes. In this case all requests are started together at the end, and this thread runs their buckets.
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
        """Wait for all requests in flight. Return the first error that a request raises, or None.

        The method waits first for the request that was started last, because most other requests end earlier.
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

    def _shelter(self, plan: SumPlan) -> None:
        """Prevent MXNet from writing gradients that are still in flight, because other ranks read these gradients.

        This method is called after an exception has interrupted the step: the user may catch the exception and start
        another backward pass. The method pushes an operation to MXNet's engine that uses the gradients until the
        requests in flight have ended, so that operators of the backward pass wait for this operation. The method itself
        does not wait, except if MXNet uses its naive engine.
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

    def _reduce_otherwise(self, plan: SumPlan) -> Exception | None:
        """Sum the gradients in groups, or with a compressor that the user has written. Return the first error, or None.

        In these two cases, this method is called instead of ``_reduce_in_place``.
        """
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

    def _reduce_sparse(self, plan: SumPlan) -> Exception | None:
        """Sum the sparse gradients: gather their rows from all ranks, and add them on every rank, in rank order.

        Return the first error, or None.
        """
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
    """Divide ``slots``, in their order, into lists whose gradients together have at most FENCE_BYTES.

    A gradient that is larger than FENCE_BYTES is alone in its list.
    """
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
    """Divide ``slots``, in their order, into ``parts`` groups. Empty groups are left out of the result.

    The numbers of slots in two groups differ by at most one.
    """
    each, more = divmod(len(slots), parts) if parts else (0, 0)
    left = iter(slots)
    groups = [list(islice(left, each + (i < more))) for i in range(parts)]
    return [group for group in groups if group]


def _leave(_: Any) -> None:
    """Do nothing. This is used for an allreduce in place, whose result need not be copied."""


def _unpack(compressor: UserCompressor | None, contexts: Sequence[Any], arrays: Sequence[Any], sums: Any) -> None:
    if compressor is not None:
        for array, ctx, total in zip(arrays, contexts, sums, strict=True):
            compressor.decompress(total, ctx).copyto(array)


def _wait_for(in_flight: Sequence[Any]) -> None:
    """Wait until all requests or handles in ``in_flight`` have ended. Ignore their errors."""
    for request in in_flight:
        with suppress(Exception):
            request.wait()
