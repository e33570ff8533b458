"""Runs blocking collectives that move data, with a name. They are described to the other ranks only the first time.

The first call with a name keeps a persistent request, as ``Operations.allreduce_in_place`` does. Later calls with the
same name and a similar tensor start that request again. The tensors are in host memory. The messages to other ranks are
those of the asynchronous methods of ``Operations``, so ranks may mix the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddlcore.api.kept_requests import kept_request, run_request
from ddlcore.api.move_calls import broadcast_spec, splits_of
from ddlcore.api.objects import check_root, checked_name
from ddlcore.api.process_set import ProcessSet
from ddlcore.api.reduce_calls import ReduceArguments, check_summable
from ddlcore.api.verb_call import Submitter, VerbCall, adopted
from ddlcore.api.world import current_job, job_of
from ddlcore.contracts.framework import JobService
from ddlcore.messages.spec import Spec
from ddlcore.runtime.request import Given, PersistentMove
from ddlcore.types import CPU, Buffer, DType, Kind

__all__ = ["BlockingCall"]


class BlockingCall:
    """The arguments that all blocking calls have in common. Each method runs one collective, and returns its result.

    ``source`` describes the tensor of the call.
    """

    __slots__ = ("_job", "_name", "_operations", "_process_set")

    def __init__(self, operations: Submitter, name: str, process_set: ProcessSet, job: JobService | None) -> None:
        self._operations = operations
        self._name = name
        self._process_set = process_set
        self._job = current_job() if job is None else job_of(job)

    def allgather(self, tensor: Any, source: Buffer) -> Any:
        """Run an allgather; see ``Operations.allgather_async``."""
        shape = source.shape[1:]

        def describe(call: VerbCall) -> Spec:
            return Spec(Kind.ALLGATHER, source.dtype, shape, device=CPU.kind, element=source.element)

        request = self._request(Kind.ALLGATHER, (source.dtype, shape, source.element), describe)
        outcome = run_request(self._job, request, Given(source, None, (source.shape[0],)))
        return adopted(self._operations.adapter, outcome, sum([rows for (rows,) in outcome.rows]), source, tensor)

    def broadcast(self, output: Any, source: Buffer, target: Buffer, root_rank: int) -> Any:
        """Run a broadcast from ``source`` on the root to ``target``, which describes ``output``. Return ``output``."""

        def describe(call: VerbCall) -> Spec:
            check_root(root_rank, call.ranks, call.set_id)
            return broadcast_spec(source, root_rank, CPU.kind)

        how = (source.dtype, source.shape, source.strides, source.element, root_rank)
        run_request(self._job, self._request(Kind.BROADCAST, how, describe), Given(source, target, ()))
        return output

    def alltoall(self, tensor: Any, source: Buffer, splits: Sequence[int] | None) -> tuple[Any, list[int]]:
        """Run an alltoall; see ``Operations.alltoall_async``."""
        _, ranks = self._process_set.resolve(self._job)
        sent, shape = splits_of(splits, source.shape[0], len(ranks)), source.shape[1:]

        def describe(call: VerbCall) -> Spec:
            return Spec(Kind.ALLTOALL, source.dtype, shape, device=CPU.kind, element=source.element)

        request = self._request(Kind.ALLTOALL, (source.dtype, shape, source.element), describe)
        outcome = run_request(self._job, request, Given(source, None, sent))
        me = ranks.index(self._job.rank)
        received = [rows[me] for rows in outcome.rows]
        return adopted(self._operations.adapter, outcome, sum(received), source, tensor), received

    def reducescatter(self, tensor: Any, source: Buffer, how: ReduceArguments) -> Any:
        """Run a reducescatter; see ``Operations.reducescatter_async``."""

        def describe(call: VerbCall) -> Spec:
            check_summable(call, how)
            return how.spec(Kind.REDUCESCATTER, source, None, CPU.kind, 0)

        request = self._request(Kind.REDUCESCATTER, (source.dtype, source.shape, source.element, how), describe)
        outcome = run_request(self._job, request, Given(source, None, ()))
        return adopted(self._operations.adapter, outcome, outcome.rows[0][0], source, tensor)

    def _request(
        self, kind: Kind, like: tuple[DType | object, ...], describe: Callable[[VerbCall], Spec]
    ) -> PersistentMove:
        """Return the persistent request that an earlier call has kept, or else a new one.

        ``like`` is what must be equal for a request to be used again.
        """
        job, operations = self._job, self._operations

        def make() -> PersistentMove:
            call = VerbCall(operations, self._name, self._process_set, job, False, True)
            spec = describe(call)
            name = f"{kind.name.lower()}.{checked_name(self._name)}"
            nothing = Buffer(0, 0, spec.dtype, (0,))
            return PersistentMove(job.waiter, call.set_id, name, spec, call.encoded[spec], nothing)

        key = (kind, self._name, self._process_set.process_set_id)
        return kept_request(job, key, (operations.adapter.name, like), make)
