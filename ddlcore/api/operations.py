"""The collectives for the tensors of all frameworks. An adapter gives access to the tensors of one framework.

Each method checks its arguments at the call (InvalidArgument, a ValueError), describes the operation in a Spec that
must be equal on all ranks, submits the operation, and returns a handle. The packages for frameworks wrap these methods
in functions with their own signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddlcore.api.objects import allgather_object, broadcast_object, check_root, checked_name
from ddlcore.api.world import ProcessSet, current_job, global_process_set, job_of
from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.framework import JobService, TensorEntry
from ddlcore.errors import InvalidArgument
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.process.job import Job
from ddlcore.runtime.device.fenced import FencedHandle, FencedPersistentRequest
from ddlcore.runtime.executor import reducescatter_rows
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import ANONYMOUS, Entry, PersistentRequest
from ddlcore.types import CPU, Adasum, Average, Buffer, DType, Kind, ReduceOp

__all__ = ["Operations"]

SPEC_CACHE_LIMIT = 65536
PERSISTENT_LIMIT = 1024  # names used by blocking in-place calls; a training loop uses few


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

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._specs: dict[Spec, bytes] = {}

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
        new tensor. ``waits``: the caller will wait for the handle next, so the call need not wake another thread to run
        the operation. For the other arguments see the class.
        """
        handle = self.grouped_allreduce_async(
            [tensor],
            outputs=None if output is None else [output],
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            compression=compression,
            job=job,
            waits=waits,
            stage_on_host=stage_on_host,
            part_of=part_of,
            _single=True,
        )
        return handle

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
        _single: bool = False,
    ) -> Handle:
        """Start an allreduce of several tensors. None of them is reduced before all of them are ready on all ranks.

        The handle's result is the list of outputs, or what ``then`` returns for it. ``part_of``: see
        ``persistent_allreduce``.
        """
        job = job or current_job()
        set_id, _ = process_set.resolve(job)
        job.compressor(compression)
        sources = [self.adapter.buffer(tensor, elementwise=True) for tensor in tensors]
        device = _device(job, sources, "allreduce", stage_on_host)
        if outputs is None:
            outputs = [self.adapter.allocate(tensor) for tensor in tensors]
            targets = [self.adapter.buffer(output, elementwise=True) for output in outputs]
        else:
            targets = self._targets(outputs, sources, tensors)
        ops = [_reduce_op(op, source.dtype) for source in sources]
        names, group = self._names(Kind.ALLREDUCE, name, len(tensors), _single)
        specs = [
            _allreduce_spec(source, reduce_op, prescale_factor, postscale_factor, compression, group, device, part_of)
            for source, reduce_op in zip(sources, ops)
        ]
        given = list(outputs)
        finish = (lambda _: given[0]) if _single else (lambda _: given if then is None else then(given))
        handle = self._handle(job, sources, finish, [*tensors, *given])
        self._submit(job, handle, set_id, names, specs, sources, targets, waits=waits)
        return handle

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
        job = job or current_job()
        set_id, _ = process_set.resolve(job)
        job.compressor(compression)
        buffer = self.adapter.buffer(tensor, elementwise=True)
        (target,) = self._targets([tensor if output is None else output], [buffer], [tensor])
        op = _reduce_op(op, buffer.dtype)
        device = _device(job, [buffer], "allreduce", stage_on_host)
        spec = _allreduce_spec(buffer, op, prescale_factor, postscale_factor, compression, 0, device, part_of)
        what = (
            job_of(job).waiter,
            set_id,
            f"allreduce.{checked_name(name)}",
            spec,
            self._encoded(spec),
            buffer,
            target,
        )
        return PersistentRequest(*what) if device == CPU.kind else FencedPersistentRequest(*what, self.adapter.after)

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
            if not name:
                self.allreduce_async(tensor, output=tensor, waits=True, **kinds).wait()
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
        stage_on_host: bool = False,
    ) -> Handle:
        """Start an allgather, and return its handle. The result is all tensors concatenated in the order of the ranks.

        The tensors are concatenated along the first dimension. They may differ between ranks only in the size of the
        first dimension. ``reduces``: the caller makes this allgather instead of an allreduce with the same ``name``. In
        messages, the allgather then has the name of an allreduce. So if another rank calls the allreduce, the names are
        equal and ddl detects a mismatch.
        """
        kind = Kind.ALLREDUCE if reduces else Kind.ALLGATHER
        return self.grouped_allgather_async(
            [tensor],
            name=name,
            process_set=process_set,
            job=job,
            sparse=sparse,
            stage_on_host=stage_on_host,
            _single=True,
            _named_as=kind,
        )

    def grouped_allgather_async(
        self,
        tensors: Sequence[Any],
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
        sparse: bool = False,
        stage_on_host: bool = False,
        _single: bool = False,
        _named_as: Kind = Kind.ALLGATHER,
    ) -> Handle:
        """Start an allgather of each of several tensors, and return one handle. Its result is the list of results.

        No tensor is gathered before all of the tensors are ready on all ranks. For each tensor, the result is the same
        as that of ``allgather_async``.
        """
        job = job or current_job()
        set_id, _ = process_set.resolve(job)
        sources = [_with_rows(self.adapter.buffer(tensor, elementwise=False), "allgather") for tensor in tensors]
        device = _device(job, sources, "allgather", stage_on_host, sparse)
        names, group = self._names(_named_as, name, len(tensors), _single)
        specs = [Spec(Kind.ALLGATHER, source.dtype, source.shape[1:], device=device, group=group) for source in sources]

        def finish(outcomes: Sequence[Outcome | None]) -> Any:
            gathered = [
                self._adopt(outcome, sum(r[0] for r in outcome.rows), source, tensor)
                for outcome, source, tensor in zip(outcomes, sources, tensors)
                if outcome is not None
            ]
            return gathered[0] if _single else gathered

        handle = self._handle(job, sources, finish, tensors)
        rows = [(source.shape[0],) for source in sources]
        self._submit(job, handle, set_id, names, specs, sources, [None] * len(specs), rows)
        return handle

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
        stage_on_host: bool = False,
    ) -> Handle:
        """Start a broadcast of the tensor of ``root_rank`` to all members, and return the handle of the operation.

        ``root_rank``: a rank of the world that is a member of the process set. ``output``: the tensor to which the
        result is written; None: the result is a new tensor.
        """
        job = job or current_job()
        set_id, ranks = process_set.resolve(job)
        check_root(root_rank, ranks, set_id)
        source = self.adapter.buffer(tensor, elementwise=True)
        if output is None:
            output = self.adapter.allocate(tensor)
        (target,) = self._targets([output], [source], [tensor])
        device = _device(job, [source], "broadcast", stage_on_host)
        names, _ = self._names(Kind.BROADCAST, name, 1, True)
        spec = Spec(
            Kind.BROADCAST,
            source.dtype,
            source.shape,
            root=root_rank,
            device=device,
            strides=source.strides,
        )
        handle = self._handle(job, [source], lambda _: output, [tensor, output])
        self._submit(job, handle, set_id, names, [spec], [source], [target])
        return handle

    # --- alltoall

    def alltoall_async(
        self,
        tensor: Any,
        splits: Sequence[int] | None = None,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
        stage_on_host: bool = False,
    ) -> Handle:
        """Start an alltoall, and return its handle: send ``splits[r]`` rows of ``tensor`` to rank r of the process set.

        ``splits``: None means that this rank sends equally many rows to all ranks. The result is a pair: the rows that
        this rank has received, and a list with the number of rows from each rank.
        """
        job = job or current_job()
        set_id, ranks = process_set.resolve(job)
        source = _with_rows(self.adapter.buffer(tensor, elementwise=False), "alltoall")
        sent = _splits(splits, source.shape[0], len(ranks))
        device = _device(job, [source], "alltoall", stage_on_host)
        names, _ = self._names(Kind.ALLTOALL, name, 1, True)
        spec = Spec(Kind.ALLTOALL, source.dtype, source.shape[1:], device=device)
        me = ranks.index(job.rank)

        def finish(outcomes: Sequence[Outcome | None]) -> Any:
            (outcome,) = outcomes
            assert outcome is not None
            received = [rows[me] for rows in outcome.rows]
            return self._adopt(outcome, sum(received), source, tensor), received

        handle = self._handle(job, [source], finish, [tensor])
        self._submit(job, handle, set_id, names, [spec], [source], [None], [sent])
        return handle

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
        stage_on_host: bool = False,
    ) -> Handle:
        """Start a reducescatter, and return its handle. The tensors are reduced, and each rank gets a part of the rows.

        If the rows cannot be divided evenly, the first ``rows % size`` ranks of the process set get one row more.
        """
        return self.grouped_reducescatter_async(
            [tensor],
            op=op,
            name=name,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            compression=compression,
            job=job,
            stage_on_host=stage_on_host,
            _single=True,
        )

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
        stage_on_host: bool = False,
        _single: bool = False,
    ) -> Handle:
        """Start a reducescatter of each of several tensors, and return one handle. Its result is the list of results.

        No tensor is reduced before all of the tensors are ready on all ranks. For each tensor, the result is the same
        as that of ``reducescatter_async``.
        """
        job = job or current_job()
        set_id, ranks = process_set.resolve(job)
        if not job.compressor(compression).summable:
            raise InvalidArgument(
                f"compression {compression!r} is not summable, which reducescatter needs; use another one"
            )
        sources = [_with_rows(self.adapter.buffer(tensor, elementwise=False), "reducescatter") for tensor in tensors]
        device = _device(job, sources, "reducescatter", stage_on_host)
        ops = [_reduce_op(op, source.dtype) for source in sources]
        names, group = self._names(Kind.REDUCESCATTER, name, len(tensors), _single)
        specs = [
            Spec(
                Kind.REDUCESCATTER,
                source.dtype,
                source.shape,
                reduce_op,
                -1,
                float(prescale_factor),
                float(postscale_factor),
                device,
                None,
                compression,
                group,
            )
            for source, reduce_op in zip(sources, ops)
        ]
        me = ranks.index(job.rank)

        def finish(outcomes: Sequence[Outcome | None]) -> Any:
            parts = [
                self._adopt(outcome, reducescatter_rows(source.shape[0], len(ranks))[me], source, tensor)
                for outcome, source, tensor in zip(outcomes, sources, tensors)
                if outcome is not None
            ]
            return parts[0] if _single else parts

        handle = self._handle(job, sources, finish, tensors)
        self._submit(job, handle, set_id, names, specs, sources, [None] * len(specs))
        return handle

    # --- objects

    def broadcast_object(
        self,
        obj: Any,
        root_rank: int = 0,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
    ) -> Any:
        """Return the object of ``root_rank`` on every member; see ``ddlcore.api.objects.broadcast_object``."""
        return broadcast_object(obj, root_rank, name, process_set, job)

    def allgather_object(
        self,
        obj: Any,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        job: JobService | None = None,
    ) -> list[Any]:
        """Return the objects of all members, in the order of ranks; see ``ddlcore.api.objects.allgather_object``."""
        return allgather_object(obj, name, process_set, job)

    # --- shared

    def _handle(
        self,
        job: JobService,
        sources: Sequence[Buffer],
        finish: Callable[[Sequence[Outcome | None]], Any],
        tensors: Sequence[Any],
    ) -> Handle:
        waiter = job_of(job).waiter
        if sources[0].device.kind == CPU.kind:
            return Handle(waiter, len(sources), finish)
        return FencedHandle(waiter, len(sources), finish, self.adapter.after, tensors)

    def _names(self, kind: Kind, name: str | None, count: int, single: bool) -> tuple[list[str], int]:
        """Return the names of a call's tensors in messages, and the group size for the Spec (0 for a single tensor).

        ``name``: the user's name for the call; None or "": no name. ``count``: the number of tensors. ``single``: the
        call is not a grouped call.

        A call without a name gets a number as its name, but only when it is submitted. If the number were given here, a
        call that fails before it is submitted would be counted on this rank only. Then the numbers of later calls on
        this rank would differ from those on other ranks, and these calls would wait forever.
        """
        if count == 0:
            raise InvalidArgument(f"grouped {kind.name.lower()}: the list of tensors is empty")
        # As in Horovod, an empty name counts as no name.
        base = f"{kind.name.lower()}.{checked_name(name)}" if name else ANONYMOUS
        if single:
            return [base], 0
        return [f"{base}[{i}]" for i in range(count)], count

    def _targets(self, outputs: Sequence[Any], sources: Sequence[Buffer], tensors: Sequence[Any]) -> list[Buffer]:
        """Return the buffers for the results, one for each of ``outputs``.

        ``outputs[i]`` is for the result of ``tensors[i]``. Raises an error if an output is not writable, or if its
        layout differs from the layout of its tensor. Raises an error if an output shares memory with another output or
        with a tensor at another index. An output may share memory with its own tensor.
        """
        if len(outputs) != len(tensors):
            raise InvalidArgument(f"{len(outputs)} outputs are given for {len(tensors)} tensors; give one for each")
        targets = [self._target(*given) for given in zip(outputs, sources, tensors)]
        if len(targets) != 1 or targets[0] is not sources[0]:
            _require_apart(sources, targets)
        return targets

    def _target(self, output: Any, source: Buffer, tensor: Any) -> Buffer:
        self.adapter.require_writable(output)
        if output is tensor:
            return source
        target = self.adapter.buffer(output, elementwise=True)
        if target.device is not source.device and target.device != source.device:
            raise InvalidArgument(
                f"output lies on {target.device}, the tensor on {source.device}; put both on one device"
            )
        if (target.shape, target.dtype, target.strides) != (source.shape, source.dtype, source.strides):
            raise InvalidArgument(
                f"output has shape {target.shape}, type {target.dtype.label} and strides {target.strides}, the tensor "
                f"{source.shape}, {source.dtype.label} and {source.strides}; pass an output with the tensor's layout"
            )
        return target

    def _adopt(self, outcome: Outcome, rows: int, source: Buffer, like: Any) -> Any:
        assert outcome.memory is not None
        return self.adapter.adopt(outcome.memory, (rows, *source.shape[1:]), source.dtype, like)

    def _submit(
        self,
        job: JobService,
        handle: Handle,
        set_id: int,
        names: Sequence[str],
        specs: Sequence[Spec],
        sources: Sequence[Buffer | None],
        targets: Sequence[Buffer | None],
        rows: Sequence[tuple[int, ...]] | None = None,
        waits: bool = False,
    ) -> None:
        entries = [
            Entry(
                handle, i, set_id, names[i], spec, self._encoded(spec), sources[i], targets[i], rows[i] if rows else ()
            )
            for i, spec in enumerate(specs)
        ]
        self.hand_over(job, handle, entries, waits)

    def hand_over(self, job: JobService, handle: Handle, entries: Sequence[TensorEntry], waits: bool) -> None:
        """Submit the entries of one call to ``job``. A framework that computes in the background overrides this method.

        The override must call ``job.name_entries(entries)`` before it returns, so that calls without a name are
        numbered in program order. The override may call ``job.submit`` later. The buffers of ``entries`` need an
        address only when ``job.submit`` is called. If ``job.submit`` raises an error, the override must pass this error
        to ``handle.refuse``. ``waits``: the caller will wait for ``handle`` next.
        """
        job.submit(entries, waits)

    def _encoded(self, spec: Spec) -> bytes:
        data = self._specs.get(spec)
        if data is None:
            if len(self._specs) > SPEC_CACHE_LIMIT:
                self._specs.clear()
            data = self._specs[spec] = encode(spec)
        return data


def _require_apart(sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
    """Raise InvalidArgument if a target shares memory with another target, or with a source at another index.

    The target at index i may be the same memory as the source at index i. Sources may overlap with each other, because
    they are only read. Tensors whose address is 0 (not known yet) are skipped.
    """
    written = [(b.address, b.address + b.nbytes, i, True) for i, b in enumerate(targets) if b.address and b.count]
    read = [
        (b.address, b.address + b.nbytes, i, False)
        for i, b in enumerate(sources)
        if b.address and b.count and b.address != targets[i].address
    ]
    end, last = 0, -1  # of the ranges that begin earlier: the largest end, and the index of its tensor
    written_end, last_written = 0, -1
    for begin, until, i, is_written in sorted(written + read):
        if (is_written and begin < end) or begin < written_end:
            other = last if is_written and begin < end else last_written
            where = f"tensors {other} and {i} of the call" if i != other else "output and tensor"
            raise InvalidArgument(
                f"{where} overlap in memory, and one of them is written; pass each tensor once, and pass "
                "copies of views that share memory"
            )
        if until > end:
            end, last = until, i
        if is_written and until > written_end:
            written_end, last_written = until, i


def _reduce_op(op: ReduceOp, dtype: DType) -> ReduceOp:
    if op == Adasum:
        raise InvalidArgument("op=Adasum is not available yet; use Average or Sum")
    try:
        op = ReduceOp(op)
    except ValueError:
        raise InvalidArgument(f"op={op!r} is none of {', '.join(o.name for o in ReduceOp)}") from None
    if dtype is DType.BOOL and op is Average:
        raise InvalidArgument("the average of bool is not defined; use Min (all), Max (any), or cast the tensor first")
    return op


def _allreduce_spec(
    source: Buffer,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    compression: str,
    group: int,
    device: str,
    part_of: str = "",
) -> Spec:
    return Spec(
        Kind.ALLREDUCE,
        source.dtype,
        source.shape,
        op,
        -1,
        float(prescale),
        float(postscale),
        device,
        source.strides,
        compression,
        group,
        part_of=part_of,
    )


def _device(job: JobService, buffers: Sequence[Buffer], verb: str, stage_on_host: bool, sparse: bool = False) -> str:
    """Return the text for the field ``device`` of a Spec. Raises InvalidArgument if ``buffers`` are on several devices.

    ``verb``: the name of the collective, for the error message.
    """
    device = buffers[0].device if buffers else CPU
    if any(other.device is not device and other.device != device for other in buffers):
        where = " and ".join(map(str, dict.fromkeys(buffer.device for buffer in buffers)))
        raise InvalidArgument(f"grouped {verb}: its tensors lie on {where}; make one call for those of each device")
    return CPU.kind if device.kind == CPU.kind else job.device_label(device, sparse, stage_on_host)


def _with_rows(buffer: Buffer, verb: str) -> Buffer:
    if not buffer.shape:
        raise InvalidArgument(f"{verb} needs a tensor with at least one dimension; reshape the scalar to (1,)")
    return buffer


def _splits(splits: Sequence[int] | None, rows: int, size: int) -> tuple[int, ...]:
    if splits is None:
        if rows % size:
            raise InvalidArgument(
                f"alltoall: the first dimension ({rows}) is not divisible by the {size} ranks; give splits"
            )
        return (rows // size,) * size
    sent = tuple(int(split) for split in splits)
    if len(sent) != size:
        raise InvalidArgument(f"alltoall: splits has {len(sent)} entries for {size} ranks; give one for each")
    if any(split < 0 for split in sent) or sum(sent) != rows:
        raise InvalidArgument(f"alltoall: splits {list(sent)} do not add up to the first dimension ({rows})")
    return sent
