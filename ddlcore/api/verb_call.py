"""Describes the tensors of one call for the other ranks, checks them, and submits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

from ddlcore.api.objects import checked_name
from ddlcore.api.process_set import ProcessSet
from ddlcore.api.world import current_job, job_of
from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.framework import JobService, TensorEntry
from ddlcore.errors import InvalidArgument
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.runtime.fenced import FencedHandle
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import ANONYMOUS, Entry
from ddlcore.types import CPU, Buffer, Kind, own_shape

__all__ = ["EncodedSpecs", "Submitter", "VerbCall", "adopted", "checked_targets", "row_target"]

SPEC_CACHE_LIMIT = 65536


class EncodedSpecs(dict[Spec, bytes]):
    """The encoded form of each Spec: a Spec is encoded when it is looked up for the first time."""

    def __missing__(self, spec: Spec) -> bytes:
        if len(self) > SPEC_CACHE_LIMIT:
            self.clear()
        data = self[spec] = encode(spec)
        return data


class Submitter(Protocol):
    """The object whose method was called; see ``Operations``."""

    adapter: Adapter
    encoded: EncodedSpecs

    def hand_over(self, job: JobService, handle: Handle, entries: Sequence[TensorEntry], waits: bool) -> None:
        """Submit the entries of one call to ``job``; see ``Operations.hand_over``."""


class VerbCall:
    """One call of a collective on this rank, from its arguments to the submission of its tensors.

    ``single``: the call is not a grouped call. For the other arguments see ``Operations``.
    """

    __slots__ = (
        "_hand_over",
        "_name",
        "_stage_on_host",
        "_waits",
        "adapter",
        "encoded",
        "job",
        "ranks",
        "set_id",
        "single",
    )

    def __init__(
        self,
        operations: Submitter,
        name: str | None,
        process_set: ProcessSet,
        job: JobService | None,
        stage_on_host: bool,
        single: bool,
        waits: bool = False,
    ) -> None:
        """Find the job and the members. Raises InvalidArgument if this rank is not a member of ``process_set``."""
        self.job = job = job or current_job()
        self.set_id, self.ranks = process_set.resolve(job)
        self.adapter = operations.adapter
        self.single = single
        self.encoded = operations.encoded
        self._hand_over = operations.hand_over
        self._name = name
        self._stage_on_host = stage_on_host
        self._waits = waits

    def names(self, kind: Kind, count: int) -> list[str]:
        """Return the names of the call's tensors in messages. ``count``: the number of tensors.

        A call without a name gets a number as its name, but only when it is submitted. If the number were given here, a
        call that fails before it is submitted would be counted on this rank only. Then the numbers of later calls on
        this rank would differ from those on other ranks, and these calls would wait forever.
        """
        if count == 0:
            raise InvalidArgument(f"grouped {kind.name.lower()}: the list of tensors is empty")
        # As in Horovod, an empty name counts as no name.
        base = f"{kind.name.lower()}.{checked_name(self._name)}" if self._name else ANONYMOUS
        return [base] if self.single else [f"{base}[{i}]" for i in range(count)]

    def device(self, buffers: Sequence[Buffer], verb: str, sparse: bool = False) -> str:
        """Return the text for the field ``device`` of a Spec.

        ``verb``: the name of the collective, for the error message. Raises InvalidArgument if ``buffers`` are on
        several devices.
        """
        device = buffers[0].device if buffers else CPU
        if len(buffers) > 1 and any(other.device is not device and other.device != device for other in buffers):
            where = " and ".join(map(str, dict.fromkeys(buffer.device for buffer in buffers)))
            raise InvalidArgument(f"grouped {verb}: its tensors lie on {where}; make one call for those of each device")
        return CPU.kind if device.kind == CPU.kind else self.job.device_label(device, sparse, self._stage_on_host)

    def sources_with_rows(self, tensors: Sequence[Any], verb: str) -> list[Buffer]:
        """Return the buffers of ``tensors``, whose rows the collective ``verb`` distributes.

        Raises InvalidArgument for a tensor without dimensions.
        """
        sources = []
        for tensor in tensors:
            source = self.adapter.buffer(tensor, elementwise=False)
            if not source.extents:
                raise InvalidArgument(f"{verb} needs a tensor with at least one dimension; reshape the scalar to (1,)")
            sources.append(source)
        return sources

    def adopt(self, outcome: Outcome, rows: int, source: Buffer, like: Any) -> Any:
        """Return the result in ``outcome`` as a tensor with ``rows`` rows. ``source`` describes the tensor ``like``."""
        return adopted(self.adapter, outcome, rows, source, like)

    def submit(
        self,
        names: Sequence[str],
        specs: Sequence[Spec],
        sources: Sequence[Buffer],
        targets: Sequence[Buffer | None],
        finish: Callable[[Sequence[Outcome | None]], Any],
        kept: Sequence[Any],
        rows: Sequence[tuple[int, ...]] | None = None,
    ) -> Handle:
        """Submit the tensors of the call, and return the handle.

        ``finish`` makes the result from the outcomes. ``kept``: all tensors of the call, inputs and outputs. ``rows``:
        for each tensor of a ragged kind, the numbers of rows that this rank announces.
        """
        waiter = job_of(self.job).waiter
        if sources[0].device.kind == CPU.kind:
            handle = Handle(waiter, len(sources), finish)
        else:
            handle = FencedHandle(waiter, len(sources), finish, self.adapter.after, kept)
        encoded, set_id = self.encoded, self.set_id
        entries = [
            Entry(handle, i, set_id, names[i], spec, encoded[spec], sources[i], targets[i], rows[i] if rows else ())
            for i, spec in enumerate(specs)
        ]
        self._hand_over(self.job, handle, entries, self._waits)
        return handle


def adopted(adapter: Adapter, outcome: Outcome, rows: int, source: Buffer, like: Any) -> Any:
    """Return the result in ``outcome`` as a tensor with ``rows`` rows. ``source`` describes the tensor ``like``."""
    assert outcome.memory is not None
    tensor = adapter.adopt(outcome.memory, (rows, *source.shape[1:]), source.dtype, like)
    return adapter.restore(tensor, like) if source.element else tensor


def checked_targets(
    adapter: Adapter, outputs: Sequence[Any], sources: Sequence[Buffer], tensors: Sequence[Any]
) -> list[Buffer]:
    """Return the buffers for the results, one for each of ``outputs``.

    ``outputs[i]`` is for the result of ``tensors[i]``. Raises an error if an output is not writable, or if its layout
    differs from the layout of its tensor. Raises an error if an output shares memory with another output or with a
    tensor at another index. An output may share memory with its own tensor.
    """
    if len(outputs) != len(tensors):
        raise InvalidArgument(f"{len(outputs)} outputs are given for {len(tensors)} tensors; give one for each")
    targets = [_target(adapter, *given) for given in zip(outputs, sources, tensors)]
    if len(targets) != 1 or targets[0] is not sources[0]:
        _require_apart(sources, targets)
    return targets


def row_target(adapter: Adapter, output: Any, source: Buffer, rows: int | None, verb: str) -> Buffer | None:
    """Return the buffer of ``output``, to which the collective ``verb`` writes rows; None if ``output`` is None.

    ``source`` describes this rank's tensor, with which ``output`` may share memory. ``rows``: how many rows the result
    has; None if that is not known before the collective. Only the number of elements counts: ``output`` may have any
    shape. Raises InvalidArgument if ``output`` does not fit, is not row-major, or is not in host memory.
    """
    if output is None:
        return None
    adapter.require_writable(output)
    target = adapter.buffer(output, elementwise=False)
    if CPU.kind != source.device.kind or CPU.kind != target.device.kind:
        raise InvalidArgument(f"{verb}: output is possible for tensors in host memory only; leave it out")
    shape = source.shape[1:]
    if target.label != source.label or (rows is not None and target.count != rows * prod(shape)):
        count = "rows" if rows is None else f"{rows} rows"
        raise InvalidArgument(
            f"{verb}: output has shape {target.extents} and type {target.label}, and the result has {count} of shape "
            f"{own_shape(shape, source.element)} and type {source.label}; pass an output of this size and type"
        )
    return target


def _target(adapter: Adapter, output: Any, source: Buffer, tensor: Any) -> Buffer:
    adapter.require_writable(output)
    if output is tensor:
        return source
    target = adapter.buffer(output, elementwise=True)
    if target.device is not source.device and target.device != source.device:
        raise InvalidArgument(f"output lies on {target.device}, the tensor on {source.device}; put both on one device")
    if (target.shape, target.label, target.strides) != (source.shape, source.label, source.strides):
        raise InvalidArgument(
            f"output has shape {target.extents}, type {target.label} and strides {target.strides}, the tensor "
            f"{source.extents}, {source.label} and {source.strides}; pass an output with the tensor's layout"
        )
    return target


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
