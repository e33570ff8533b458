"""Runs a blocking call without a name by a persistent request, if the call is the next bucket of the schedule.

Outside of replay, the spec of such a call describes it to the other ranks, and its number pairs it with their calls. In
replay, its place in the schedule does both. The request is kept for later calls with similar tensors. ``ddlcore.api``
does not import this module, because most ranks do not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ddlcore.api.kept_requests import PERSISTENT_LIMIT
from ddlcore.api.move_calls import allgather_spec, alltoall_spec, broadcast_spec, splits_of
from ddlcore.api.process_set import ProcessSet
from ddlcore.api.reduce_calls import ReduceArguments
from ddlcore.api.verb_call import Submitter, VerbCall, row_target
from ddlcore.api.world import current_job
from ddlcore.messages.spec import Spec
from ddlcore.process.job import Job
from ddlcore.runtime.host_reductions import reducescatter_rows
from ddlcore.runtime.request import ANONYMOUS, Given, PersistentMove, PersistentRequest
from ddlcore.types import CPU, Buffer, DType, Kind

__all__ = ["UnnamedBlockingCalls"]

_NOTHING = Buffer(0, 0, DType.U8, (0,))


class _Like(NamedTuple):
    """The tensors that a kept request was made for. Tensors that differ only in their addresses may use it, too."""

    source: Buffer
    target: Buffer | None = None
    rows: tuple[int, ...] = ()


class UnnamedBlockingCalls:
    """Blocking calls without a name, made by the members of ``process_set``.

    Each method returns whether it has run the call. If it returns False, nothing has happened, and the caller must make
    the call by the methods of ``operations``. It returns False if the call is not the next bucket of the schedule, or if
    a tensor or an output is not in host memory or not row-major. ``timeout_s``: after so many seconds, the method raises
    DeadlineExceeded; the operation then still writes to the tensor when it ends. The other errors are those of
    ``Operations``. Any thread may call the methods.
    """

    def __init__(self, operations: Submitter, process_set: ProcessSet) -> None:
        self._operations = operations
        self._adapter = operations.adapter
        self._process_set = process_set

    def allreduce(self, tensor: Any, how: ReduceArguments, timeout_s: float) -> bool:
        """Reduce ``tensor`` in place; see ``Operations.allreduce_async``."""
        job = current_job()
        if job.tensor_queue.open is None:
            return False
        key = (how, self._process_set.process_set_id, tensor.shape, tensor.dtype)
        request = job.persistent_requests.get(key)
        if request is None:

            def make(call: VerbCall, source: Buffer) -> tuple[Spec, _Like]:
                return how.spec(Kind.ALLREDUCE, source, None, CPU.kind, 0), _Like(source)

            request = self._new(job, key, tensor, tensor, make, PersistentRequest)
            if request is None:
                return False
        address = self._adapter.address(tensor, request.how.source)
        return address is not None and job.run_unnamed(request, address, tensor, timeout_s)

    def broadcast(self, tensor: Any, root_rank: int, timeout_s: float) -> bool:
        """Broadcast ``tensor`` in place; see ``Operations.broadcast_async``."""

        def make(call: VerbCall, source: Buffer) -> tuple[Spec, _Like]:
            return broadcast_spec(source, root_rank, CPU.kind), _Like(source, source)

        return self._move(("broadcast", root_rank), tensor, tensor, timeout_s, make)

    def allgather(self, tensor: Any, output: Any, timeout_s: float) -> bool:
        """Gather to ``output``; see ``Operations.allgather_async``."""

        def make(call: VerbCall, source: Buffer) -> tuple[Spec, _Like]:
            target = row_target(self._adapter, output, source, source.shape[0] * len(call.ranks), "allgather")
            rows = (source.shape[0],)
            return allgather_spec(source, CPU.kind, 0, rows), _Like(source, target, rows)

        return self._move("allgather", tensor, output, timeout_s, make)

    def alltoall(self, tensor: Any, output: Any, timeout_s: float) -> bool:
        """Send equally many rows to all members; see ``Operations.alltoall_async``."""

        def make(call: VerbCall, source: Buffer) -> tuple[Spec, _Like]:
            target = row_target(self._adapter, output, source, source.shape[0], "alltoall")
            sent = splits_of(None, source.shape[0], len(call.ranks))
            return alltoall_spec(source, CPU.kind, sent), _Like(source, target, sent)

        return self._move("alltoall", tensor, output, timeout_s, make)

    def reducescatter(self, tensor: Any, output: Any, how: ReduceArguments, timeout_s: float) -> bool:
        """Reduce, and write this rank's part to ``output``; see ``Operations.reducescatter_async``."""

        def make(call: VerbCall, source: Buffer) -> tuple[Spec, _Like]:
            mine = reducescatter_rows(source.shape[0], len(call.ranks))[call.ranks.index(call.job.rank)]
            target = row_target(self._adapter, output, source, mine, "reducescatter")
            return how.spec(Kind.REDUCESCATTER, source, None, CPU.kind, 0), _Like(source, target)

        return self._move(how, tensor, output, timeout_s, make)

    def barrier(self, timeout_s: float) -> bool:
        """Wait until all members have called this; see ``framework_groups.barrier_async``."""
        job = current_job()
        if job.tensor_queue.open is None:
            return False
        key = ("barrier", self._process_set.process_set_id)
        request = job.persistent_requests.get(key)
        if request is None:
            request = self._keep(job, key, lambda call: (Spec(Kind.BARRIER), _Like(_NOTHING)), PersistentMove)
        return job.run_unnamed(request, 0, Given(_NOTHING, None, ()), timeout_s)

    def _move(
        self,
        what: Hashable,
        tensor: Any,
        output: Any,
        timeout_s: float,
        make: Callable[[VerbCall, Buffer], tuple[Spec, _Like]],
    ) -> bool:
        job = current_job()
        if job.tensor_queue.open is None:
            return False
        key = (what, self._process_set.process_set_id, tensor.shape, tensor.dtype, output.shape)
        request = job.persistent_requests.get(key)
        if request is None:
            request = self._new(job, key, tensor, output, make, PersistentMove)
            if request is None:
                return False
        like: _Like = request.how
        source = self._at(tensor, like.source)
        if source is None or like.target is None:
            return False
        target = source if output is tensor else self._at(output, like.target)
        if target is None:
            return False
        return job.run_unnamed(request, 0, Given(source, target, like.rows), timeout_s)

    def _at(self, tensor: Any, like: Buffer) -> Buffer | None:
        address = self._adapter.address(tensor, like)
        return None if address is None else Buffer(address, like.count, like.dtype, like.shape, owner=tensor)

    def _new(
        self,
        job: Job,
        key: Hashable,
        tensor: Any,
        output: Any,
        make: Callable[[VerbCall, Buffer], tuple[Spec, _Like]],
        kind: type[PersistentRequest],
    ) -> PersistentRequest | None:
        """Return a new request for calls with such tensors, and keep it. Return None if they need the usual way.

        ``key`` is equal for the calls that may use it.
        """
        source = self._adapter.buffer(tensor, elementwise=True)
        if source.device.kind != CPU.kind or source.strides is not None or source.element:
            return None
        self._adapter.require_writable(output)
        return self._keep(job, key, lambda call: make(call, source), kind)

    def _keep(
        self,
        job: Job,
        key: Hashable,
        make: Callable[[VerbCall], tuple[Spec, _Like]],
        kind: type[PersistentRequest],
    ) -> PersistentRequest:
        call = VerbCall(self._operations, None, self._process_set, job, False, True)
        spec, like = make(call)
        source = like.source if kind is PersistentRequest else Buffer(0, 0, like.source.dtype, (0,))
        request = kind(job.waiter, call.set_id, ANONYMOUS, spec, call.encoded[spec], source)
        request.how = like
        if len(job.persistent_requests) >= PERSISTENT_LIMIT:
            job.retire()
        job.persistent_requests[key] = request
        return request
