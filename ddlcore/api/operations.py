"""The collectives for the tensors of all frameworks. An adapter gives access to the tensors of one framework.

Each method checks its arguments at the call (InvalidArgument, a ValueError), describes the operation in a Spec that
must be equal on all ranks, submits the operation, and returns a handle. The packages for frameworks wrap these methods
in functions with their own signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddlcore.api.blocking_calls import BlockingCall
from ddlcore.api.kept_requests import PERSISTENT_LIMIT
from ddlcore.api.move_calls import allgather, alltoall, broadcast
from ddlcore.api.objects import allgather_object, broadcast_object
from ddlcore.api.process_set import ProcessSet, global_process_set
from ddlcore.api.reduce_calls import ReduceArguments, allreduce, persistent_allreduce, reducescatter
from ddlcore.api.verb_call import EncodedSpecs, VerbCall, checked_targets
from ddlcore.api.world import current_job
from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.framework import JobService, TensorEntry
from ddlcore.process.job import Job
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.request import PersistentRequest
from ddlcore.types import CPU, Average, Buffer, Kind, ReduceOp

__all__ = ["Operations"]


class Operations:
    """The collectives of one framework. All members of the process set must call the same method. Any thread may call.

    These arguments are common to several methods. ``name`` pairs the calls of different ranks; calls without a name are
    paired by their order within the process set. ``job``: the job to use; None means the current job. ``waits``: the
    caller will wait for the handle next, so the call need not wake another thread to run the operation.
    ``stage_on_host``: stage device tensors in host memory, even if a transport could reduce them on the device.
    ``sparse``: the tensors belong to a sparse gradient, see the setting ``device_sparse``. ``compression``: the name of
    a compressor; "setting" means the compressor that the setting ``compression`` names. All ranks must pass the same
    values of ``name``, ``op``, the factors, ``compression``, ``stage_on_host`` and ``sparse``.

    Integers: an average is exact and truncated toward zero. A sum wraps around, as in C. For integers,
    ``prescale_factor`` and ``postscale_factor`` are applied in float64. Each value times ``prescale_factor`` is
    truncated toward zero, and these products are added exactly. The sum times ``postscale_factor`` (divided by the
    number of ranks, for an average) is truncated toward zero.

    Tensors on devices: ``wait`` returns when the work has been enqueued on the device, not when it is complete.
    ``wait`` makes the current device stream, not the host, wait for the work.
    """

    background = False  # whether the framework computes in the background, and so overrides ``hand_over``

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.encoded = EncodedSpecs()  # of all calls, so that equal tensors share the bytes

    # --- allreduce

    def allreduce_async(
        self,
        tensor: Any,
        *,
        output: Any = None,
        name: str | None = None,
        op: ReduceOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        compression: str = "none",
        job: JobService | None = None,
        waits: bool = False,
        stage_on_host: bool = False,
        part_of: str = "",
    ) -> Handle:
        """Start an allreduce of the ranks' tensors with ``op``, and return the handle of the operation.

        ``output``: the tensor to which the result is written; ``output=tensor`` works in place. None: the result is a
        new tensor. For the other arguments see the class.
        """
        call = VerbCall(self, name, process_set, job, stage_on_host, single=True, waits=waits)
        how = ReduceArguments(op, prescale_factor, postscale_factor, compression, part_of)
        return allreduce(call, [tensor], None if output is None else [output], how)

    def grouped_allreduce_async(
        self,
        tensors: Sequence[Any],
        *,
        outputs: Sequence[Any] | None = None,
        name: str | None = None,
        op: ReduceOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        compression: str = "none",
        job: JobService | None = None,
        waits: bool = False,
        stage_on_host: bool = False,
        part_of: str = "",
        then: Callable[[list[Any]], Any] | None = None,
    ) -> Handle:
        """Start an allreduce of several tensors. None of them is reduced before all of them are ready on all ranks.

        The handle's result is the list of outputs, or what ``then`` returns for it. ``part_of``: see
        ``persistent_allreduce``.
        """
        call = VerbCall(self, name, process_set, job, stage_on_host, single=False, waits=waits)
        how = ReduceArguments(op, prescale_factor, postscale_factor, compression, part_of)
        return allreduce(call, tensors, outputs, how, then)

    def persistent_allreduce(
        self,
        tensor: Any,
        *,
        name: str,
        op: ReduceOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        compression: str = "none",
        job: JobService | None = None,
        output: Any = None,
        part_of: str = "",
        stage_on_host: bool = False,
    ) -> PersistentRequest:
        """Return a persistent request for allreduces of tensors with the layout of ``tensor``. Nothing is sent yet.

        ``job.start_request(request, address, owner)`` starts the operation, and ``request.wait()`` waits for it. Other
        ranks may call ``allreduce_async`` with the same name instead, because the messages are the same. ``output``:
        the tensor to which the result is written, until ``request.set_target`` changes the target; None: the result is
        written to the tensor itself. ``part_of``: a text that names the optimizer, or any other object, to which the
        tensor belongs. If ranks pass different texts, MismatchError is raised, with all of these texts.
        """
        call = VerbCall(self, name, process_set, job, stage_on_host, single=True)
        how = ReduceArguments(op, prescale_factor, postscale_factor, compression, part_of)
        return persistent_allreduce(call, tensor, output, name, how)

    def allreduce_in_place(
        self,
        tensor: Any,
        *,
        name: str | None = None,
        op: ReduceOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        compression: str = "none",
        job: Job | None = None,
    ) -> None:
        """Reduce ``tensor`` in place: do the same as ``allreduce_async(tensor, output=tensor)``, and wait for the end.

        If ``name`` is given, the first call with this name keeps a persistent request, and later calls with the same
        name and similar tensors reuse that request.
        """
        job = job or current_job()
        prescale_factor, postscale_factor = float(prescale_factor), float(postscale_factor)
        set_id = process_set.process_set_id
        how = (self.adapter.name, op, prescale_factor, postscale_factor, compression)  # compared, not hashed: faster
        request = job.persistent_requests.get((name, set_id))
        address, owner = None, tensor
        if request is not None and request.how == how:
            address = self.adapter.address(tensor, request.source)
        if request is None or address is None:
            factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
            kinds: Any = {**factors, "op": op, "process_set": process_set, "compression": compression, "job": job}
            if not name or self.background:
                self.allreduce_async(tensor, output=tensor, name=name, waits=True, **kinds).wait()
                return
            if len(job.persistent_requests) >= PERSISTENT_LIMIT:
                job.retire()
            request = self.persistent_allreduce(tensor, name=name, **kinds)
            request.how = how
            job.persistent_requests[name, set_id] = request
            address, owner = request.source.address, request.source.owner
        job.start_and_wait(request, address, owner)

    # --- allgather

    def allgather_async(
        self,
        tensor: Any,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
        reduces: bool = False,
        sparse: bool = False,
        waits: bool = False,
        stage_on_host: bool = False,
        output: Any = None,
        part_of: str = "",
    ) -> Handle:
        """Start an allgather, and return its handle. The result is all tensors concatenated in the order of the ranks.

        The tensors are concatenated along the first dimension. They may differ between ranks only in the size of the
        first dimension. ``output``: the tensor to which the result is written; None: the result is a new tensor. If one
        rank gives an ``output``, all must, and the tensors of all ranks must have the same shape. ``output`` may have
        any shape with as many elements as the result, and this rank's tensor may be a part of it. ``reduces``: the caller
        makes this allgather instead of an allreduce with the same ``name``. In messages, the allgather then has the name
        of an allreduce. So if another rank calls the allreduce, the names are equal and ddl detects a mismatch.
        ``part_of``: see ``persistent_allreduce``.
        """
        call = VerbCall(self, name, process_set, job, stage_on_host, single=True, waits=waits)
        outputs = None if output is None else [output]
        return allgather(call, [tensor], Kind.ALLREDUCE if reduces else Kind.ALLGATHER, sparse, outputs, part_of)

    def grouped_allgather_async(
        self,
        tensors: Sequence[Any],
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
        sparse: bool = False,
        waits: bool = False,
        stage_on_host: bool = False,
        outputs: Sequence[Any] | None = None,
    ) -> Handle:
        """Start an allgather of each of several tensors, and return one handle. Its result is the list of results.

        No tensor is gathered before all of the tensors are ready on all ranks. For each tensor, the result is the same
        as that of ``allgather_async``. ``outputs``: the tensors to which the results are written.
        """
        call = VerbCall(self, name, process_set, job, stage_on_host, single=False, waits=waits)
        return allgather(call, tensors, Kind.ALLGATHER, sparse, outputs)

    def allgather(
        self,
        tensor: Any,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
    ) -> Any:
        """Run an allgather, wait for its end, and return its result; see ``allgather_async`` and ``broadcast``."""
        source = self._named_on_host(tensor, name, False)
        if source is None:
            return self.allgather_async(tensor, name=name, process_set=process_set, job=job, waits=True).wait()
        return BlockingCall(self, str(name), process_set, job).allgather(tensor, source)

    # --- broadcast

    def broadcast_async(
        self,
        tensor: Any,
        root_rank: int,
        *,
        output: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
        waits: bool = False,
        stage_on_host: bool = False,
    ) -> Handle:
        """Start a broadcast of the tensor of ``root_rank`` to all members, and return the handle of the operation.

        ``root_rank``: a rank of the world that is a member of the process set. ``output``: the tensor to which the
        result is written; None: the result is a new tensor.
        """
        call = VerbCall(self, name, process_set, job, stage_on_host, single=True, waits=waits)
        return broadcast(call, tensor, root_rank, output)

    def broadcast(
        self,
        tensor: Any,
        root_rank: int,
        *,
        output: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
    ) -> Any:
        """Run a broadcast, wait for its end, and return its result; see ``broadcast_async``.

        If ``name`` is given, the first call with this name keeps a persistent request, and later calls with the same
        name and similar tensors reuse that request. The same holds for ``allgather``, ``alltoall`` and ``reducescatter``.
        """
        source = self._named_on_host(tensor, name, True) if type(root_rank) is int else None
        if source is None:
            how: Any = {"output": output, "name": name, "process_set": process_set, "job": job}
            return self.broadcast_async(tensor, root_rank, waits=True, **how).wait()
        call = BlockingCall(self, str(name), process_set, job)
        if output is None:
            output = self.adapter.allocate(tensor)
            return call.broadcast(output, source, self.adapter.buffer(output, elementwise=True), root_rank)
        (target,) = checked_targets(self.adapter, [output], [source], [tensor])
        return call.broadcast(output, source, target, root_rank)

    # --- alltoall

    def alltoall_async(
        self,
        tensor: Any,
        splits: Sequence[int] | None = None,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
        waits: bool = False,
        stage_on_host: bool = False,
        output: Any = None,
        part_of: str = "",
    ) -> Handle:
        """Start an alltoall, and return its handle: send ``splits[r]`` rows of ``tensor`` to rank r of the process set.

        ``splits``: None means that this rank sends equally many rows to all ranks. The result is a pair: the rows that
        this rank has received, and a list with the number of rows from each rank. ``output``: the tensor to which the
        received rows are written; None: they are a new tensor. If a rank gives an ``output`` and no ``splits``, all
        ranks must do so, and their tensors must have the same shape. If the received rows do not fill ``output``, the
        operation fails on this rank (TransportError). ``part_of``: see ``persistent_allreduce``.
        """
        call = VerbCall(self, name, process_set, job, stage_on_host, single=True, waits=waits)
        return alltoall(call, tensor, splits, output, part_of)

    def alltoall(
        self,
        tensor: Any,
        splits: Sequence[int] | None = None,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
    ) -> Any:
        """Run an alltoall, wait for its end, and return its result; see ``alltoall_async`` and ``broadcast``."""
        source = self._named_on_host(tensor, name, False)
        if source is None:
            return self.alltoall_async(tensor, splits, name=name, process_set=process_set, job=job, waits=True).wait()
        call = BlockingCall(self, str(name), process_set, job)
        return call.alltoall(tensor, source, splits)

    # --- reducescatter

    def reducescatter_async(
        self,
        tensor: Any,
        *,
        op: ReduceOp = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        compression: str = "none",
        job: JobService | None = None,
        waits: bool = False,
        stage_on_host: bool = False,
        output: Any = None,
    ) -> Handle:
        """Start a reducescatter, and return its handle. The tensors are reduced, and each rank gets a part of the rows.

        If the rows cannot be divided evenly, the first ``rows % size`` ranks of the process set get one row more.
        ``output``: the tensor to which this rank's part is written; None: the part is a new tensor. ``output`` may
        share memory with ``tensor``.
        """
        call = VerbCall(self, name, process_set, job, stage_on_host, single=True, waits=waits)
        how = ReduceArguments(op, prescale_factor, postscale_factor, compression)
        return reducescatter(call, [tensor], how, None if output is None else [output])

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[Any],
        *,
        op: ReduceOp = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        compression: str = "none",
        job: JobService | None = None,
        waits: bool = False,
        stage_on_host: bool = False,
        outputs: Sequence[Any] | None = None,
    ) -> Handle:
        """Start a reducescatter of each of several tensors, and return one handle. Its result is the list of results.

        No tensor is reduced before all of the tensors are ready on all ranks. For each tensor, the result is the same
        as that of ``reducescatter_async``. ``outputs``: the tensors to which the results are written.
        """
        call = VerbCall(self, name, process_set, job, stage_on_host, single=False, waits=waits)
        how = ReduceArguments(op, prescale_factor, postscale_factor, compression)
        return reducescatter(call, tensors, how, outputs)

    def reducescatter(
        self,
        tensor: Any,
        *,
        op: ReduceOp = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        compression: str = "none",
        job: JobService | None = None,
    ) -> Any:
        """Run a reducescatter, wait for its end, and return its result; see ``reducescatter_async`` and ``broadcast``."""
        # As numbers: an array might have another value at the next call, and would still be the same object.
        how = ReduceArguments(op, float(prescale_factor), float(postscale_factor), compression)
        source = self._named_on_host(tensor, name, False)
        if source is None:
            call = VerbCall(self, name, process_set, job, False, single=True, waits=True)
            return reducescatter(call, [tensor], how).wait()
        blocking = BlockingCall(self, str(name), process_set, job)
        return blocking.reducescatter(tensor, source, how)

    def _named_on_host(self, tensor: Any, name: str | None, elementwise: bool) -> Buffer | None:
        """Return the buffer of ``tensor`` if the call has a name and the tensor is in host memory; otherwise None.

        ``elementwise`` is False if the collective distributes rows. Then a scalar is left to the asynchronous method,
        which refuses it.
        """
        if self.background or not name or not isinstance(name, str):  # the asynchronous method refuses other types
            return None
        source = self.adapter.buffer(tensor, elementwise=elementwise)
        return source if source.device.kind == CPU.kind and (elementwise or source.extents) else None

    # --- objects, which are the same for all frameworks

    broadcast_object = staticmethod(broadcast_object)
    allgather_object = staticmethod(allgather_object)

    # --- submission

    def hand_over(self, job: JobService, handle: Handle, entries: Sequence[TensorEntry], waits: bool) -> None:
        """Submit the entries of one call to ``job``. A framework that computes in the background overrides this method.

        Such a framework also sets ``background``: then blocking calls are made as the asynchronous ones, by this method.
        The override must call ``job.name_entries(entries)`` before it returns, so that calls without a name are
        numbered in program order. The override may call ``job.submit`` later. The buffers of ``entries`` need an
        address only when ``job.submit`` is called. If ``job.submit`` raises an error, the override must pass this error
        to ``handle.refuse``. ``waits``: the caller will wait for ``handle`` next.
        """
        job.submit(entries, waits)
