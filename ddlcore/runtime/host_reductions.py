"""Runs allreduces and reducescatters of tensors in host memory.

This module averages, scales, casts and fuses tensors, unless the transport's capabilities say that the transport does
this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Capabilities, Memory, Move, Plan, Prepared
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket
from ddlcore.runtime.atomic_allreduce import AtomicAllreduce
from ddlcore.runtime.delivery import Deliver, Staged
from ddlcore.runtime.encoding import encode, encode_once, settle
from ddlcore.runtime.host_moves import Movement, apart
from ddlcore.runtime.integers import Exact, is_exact
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.process_sets import Communicator
from ddlcore.runtime.request import Entry
from ddlcore.runtime.scaling import Scaling, divisor_of, reduction, scaling
from ddlcore.runtime.sharded import Sharder
from ddlcore.runtime.transport_calls import Unserved, finish, new_memory, prepared, require
from ddlcore.types import Buffer, Kind, ReduceOp


def reducescatter_rows(rows: int, size: int) -> list[int]:
    """Return the number of rows that each of ``size`` ranks gets if ``rows`` rows are divided among them.

    The first ``rows % size`` ranks get one row more than the others.
    """
    return [rows // size + (rank < rows % size) for rank in range(size)]


class HostReductions:
    """Reduces tensors in host memory. Only the thread that runs buckets uses this object.

    ``compressor(name)`` returns the compressor that has this name.
    """

    def __init__(self, kernels: Kernels, compressor: Callable[[str], Compressor], meter: Meter) -> None:
        self._meter = meter
        self._kernels = kernels
        self._compressor = compressor
        self._prepared: dict[tuple[int, Plan], Prepared] = {}
        self._sharder = Sharder(kernels, meter)

    def allreduce(
        self, communicator: Communicator, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        """Run the negotiated allreduce ``bucket``, and return one outcome for each entry.

        The results are in the targets of the entries. An entry is None if this rank has joined.
        """
        spec, divisor = specs[0], divisor_of(communicator, bucket)
        op, postscale = reduction(spec, divisor)
        compressor = self._traveling(spec, divisor)
        capabilities = communicator.transport.capabilities_for(Kind.ALLREDUCE)
        unscaled = spec.prescale == 1.0 and postscale == 1.0
        plain = compressor.wire_dtype(spec.dtype) is spec.dtype and not isinstance(compressor, Exact)
        # A rank that has joined contributes the identity element, which a prescale inside the transport would change.
        # So such a bucket is packed, and the identity is written after the scaling.
        if not (capabilities.vectored and plain and (unscaled or (capabilities.scales and not bucket.specs))):
            return self.packed(communicator, bucket.names, entries, specs, "fusion", divisor, joined=True)()
        require(communicator, Kind.ALLREDUCE, spec.dtype, op)
        pairs = [self._pair(entry, s, op) for entry, s in zip(entries, specs)]
        plan = Plan(tuple(source.count for source, _ in pairs), spec.dtype, op, spec.prescale, postscale)
        finish(self._prepare(communicator, plan).start([s.address for s, _ in pairs], [t.address for _, t in pairs]))
        return [None] * len(entries)

    def atomic(self, communicator: Communicator, specs: Sequence[Spec]) -> AtomicAllreduce | None:
        """Return an atomic allreduce for a schedule: it writes no result unless all ranks take part with real data.

        Return None if the transport cannot do an atomic allreduce for tensors with ``specs``.
        """
        spec = specs[0]
        op, postscale = reduction(spec, len(communicator.ranks))
        counts = tuple(prod(one.shape) for one in specs)
        capabilities = communicator.transport.capabilities_for(Kind.ALLREDUCE)
        scaled = spec.prescale != 1.0 or postscale != 1.0
        compressor = self._traveling(spec, len(communicator.ranks))
        plain = compressor.wire_dtype(spec.dtype) is spec.dtype and not isinstance(compressor, Exact)
        if not (capabilities.atomic and plain and any(counts) and (capabilities.scales or not scaled)):
            return None
        require(communicator, Kind.ALLREDUCE, spec.dtype, op)
        prepared = self._prepare(communicator, Plan(counts, spec.dtype, op, spec.prescale, postscale))
        return AtomicAllreduce(prepared, len(specs), capabilities.resumable)

    def packed(
        self,
        communicator: Communicator,
        names: Sequence[str],
        entries: Sequence[Entry | None],
        specs: Sequence[Spec],
        use: str,
        divisor: int,
        joined: bool = False,
    ) -> Deliver:
        """Run an allreduce in transport memory, and return the function that delivers its results.

        ``use`` names the transport buffer. An average divides by ``divisor``. ``joined`` says that some of the ranks may
        have joined.
        """
        op, _ = reduction(specs[0], divisor)
        compressor = self._traveling(specs[0], divisor)
        wire = compressor.wire_dtype(specs[0].dtype)
        if not compressor.summable and wire is not specs[0].dtype:
            return self._sharded(communicator, names, entries, specs, use, divisor)
        require(communicator, Kind.ALLREDUCE, wire, op)
        pairs = [self._pair(entry, spec, op) for entry, spec in zip(entries, specs)]
        capabilities = communicator.transport.capabilities_for(Kind.ALLREDUCE)
        scales = _scaling(compressor, capabilities, specs[0], divisor, joined)
        parts = self._reduce_packed(communicator, compressor, entries, pairs, scales, op, use)

        def deliver() -> list[Outcome | None]:
            begun_ns = now_ns()
            for entry, (_, target), part in zip(entries, pairs, parts):
                if entry is not None:
                    compressor.decode(entry.name, part, target, scales.decode)
            settle(compressor, entries, True)
            self._meter.unpack_ns += now_ns() - begun_ns
            return [None] * len(entries)

        return deliver if compressor.casts else Staged(deliver, partial(settle, compressor, entries, False))

    def _reduce_packed(
        self,
        communicator: Communicator,
        compressor: Compressor,
        entries: Sequence[Entry | None],
        pairs: Sequence[tuple[Buffer, Buffer]],
        scales: Scaling,
        op: ReduceOp,
        use: str,
    ) -> list[Buffer]:
        """Encode the sources into one fusion buffer, reduce that buffer in place, and return its parts.

        There is one part for each tensor. ``pairs`` contains the source and the target of each tensor, ``scales`` says
        where values are scaled, and ``use`` names the fusion buffer.
        """
        begun_ns = now_ns()
        wire = compressor.wire_dtype(pairs[0][0].dtype)
        words = compressor.words if isinstance(compressor, Exact) else 1
        counts = [source.count * words for source, _ in pairs]
        fused = communicator.buffers.get(use, sum(counts), wire)
        parts = _parts(fused, counts)
        for entry, (source, _), part in zip(entries, pairs, parts):
            if entry is None:
                self._kernels.fill_identity(part.address, part.count, wire, op)
            else:
                encode(compressor, entry, source, part, scales.encode)
        self._meter.pack_ns += now_ns() - begun_ns
        if scales.inside is not None:
            plan = Plan((fused.count,), wire, op, *scales.inside)
            finish(self._prepare(communicator, plan).start([fused.address], [fused.address]))
        else:
            finish(communicator.transport.allreduce(fused, fused, op))
        return parts

    def _sharded(
        self,
        communicator: Communicator,
        names: Sequence[str],
        entries: Sequence[Entry | None],
        specs: Sequence[Spec],
        use: str,
        divisor: int,
    ) -> Staged:
        """Run an allreduce with a compressor whose encoded values cannot be added.

        Each rank decodes and adds one share of the values, and then all ranks exchange the results. ``use`` names the
        fusion buffer. Raises Unserved if the reduction is neither a sum nor an average.
        """
        op, postscale = reduction(specs[0], divisor)
        name = specs[0].compressor
        if op is not ReduceOp.Sum:
            raise Unserved(f"compression {name!r} is for sums and averages, not for {op.name.lower()}; use another one")
        counts = [prod(spec.shape) for spec in specs]
        summed = self._sharder.allreduce(
            communicator, self._compressor(name), names, entries, specs, counts, use, postscale
        )
        return Staged(lambda: [*summed()], summed.void)

    def reducescatter(self, communicator: Communicator, spec: Spec, divisor: int) -> Movement:
        """Return the movement of a reducescatter of a tensor with ``spec``. An average divides by ``divisor``."""
        return _Reducescatter(self._kernels, self._traveling(spec, divisor), communicator, spec, divisor)

    def _traveling(self, spec: Spec, size: int) -> Compressor:
        """Return the compressor that encodes tensors with ``spec`` for the transport and decodes the result.

        ``size`` is the number of ranks that take part.
        """
        compressor = self._compressor(spec.compressor)
        if is_exact(spec, size) and compressor.wire_dtype(spec.dtype) is spec.dtype:
            return Exact(self._kernels, spec, size)
        return compressor

    def _pair(self, entry: Entry | None, spec: Spec, op: ReduceOp) -> tuple[Buffer, Buffer]:
        """Return the source and the target of one tensor.

        If ``entry`` is None, this rank does not have the tensor. Then source and target are the same dummy memory,
        whose values do not change the result of the operation.
        """
        if entry is not None:
            assert entry.source is not None and entry.target is not None
            return entry.source, entry.target
        dummy = new_memory(prod(spec.shape), spec.dtype)
        self._kernels.fill_identity(dummy.address, dummy.count, spec.dtype, op)
        return dummy, dummy

    def _prepare(self, communicator: Communicator, plan: Plan) -> Prepared:
        return prepared(self._prepared, (communicator.set_id, plan), communicator.transport, plan)

    def reopened(self) -> None:
        """Drop all prepared operations, because all communicators were closed and opened anew."""
        self._prepared.clear()

    def forget(self, set_id: int) -> None:
        """Drop all prepared operations of process set ``set_id``, which is removed."""
        self._prepared = {key: prepared for key, prepared in self._prepared.items() if key[0] != set_id}


class _Reducescatter(Movement):
    def __init__(
        self, kernels: Kernels, compressor: Compressor, communicator: Communicator, spec: Spec, divisor: int
    ) -> None:
        wire = compressor.wire_dtype(spec.dtype)
        super().__init__(Move(Kind.REDUCESCATTER, wire, reduction(spec, divisor)[0]))
        require(communicator, Kind.REDUCESCATTER, wire, self.move.op)
        self._kernels, self._compressor, self._buffers, self._spec = kernels, compressor, communicator.buffers, spec
        self._scales = _scaling(compressor, None, spec, divisor)
        self._words = compressor.words if isinstance(compressor, Exact) else 1  # elements that are sent for one
        plain = wire is spec.dtype and not isinstance(compressor, Exact)
        # Values that are decoded are kept apart: decoding may be repeated, and must find what came from the transport.
        self._apart = not plain or self._scales.decode != 1.0
        self._encoded = not plain or self._scales.encode != 1.0
        row = prod(spec.shape[1:]) * self._words
        parts = reducescatter_rows(spec.shape[0], len(communicator.ranks))
        self._rows = ((parts[communicator.rank],),)
        counts = tuple(rows * row for rows in parts)
        self.counts, self._count, self._own = counts, sum(counts), counts[communicator.rank]
        self._result = self.target

    def begin(self, entry: Entry | None, told: Sequence[int]) -> None:
        wire, target = self.move.dtype, None
        if entry is None:
            source = self._buffers.get("scatter", self._count, wire)
            self._kernels.fill_identity(source.address, self._count, wire, self.move.op)
        else:
            given, target = entry.given.source, entry.given.target
            assert given is not None
            source = given
            if self._encoded:
                source = self._buffers.get("scatter", self._count, wire)
                encode_once(self._compressor, given, source, self._scales.encode)
            elif target is not None and not self._apart:
                source = apart(source, target, self._buffers)
        own = self._own // self._words
        self._result = target if target is not None else self._buffers.result(own, self._spec.dtype)
        self.source = source
        self.target = self._buffers.get("part", self._own, wire) if self._apart else self._result

    def end(self, entry: Entry | None) -> Outcome | None:
        if entry is not None and self.target is not self._result:
            self._compressor.decode(entry.name, self.target, self._result, self._scales.decode)
        if entry is not None and entry.given.target is not None:
            return Outcome(None, self._rows)
        assert isinstance(self._result.owner, Memory)
        return Outcome(self._result.owner, self._rows)

    def forget(self) -> None:
        super().forget()
        self._result = self.target


def _scaling(
    compressor: Compressor, capabilities: Capabilities | None, spec: Spec, size: int, joined: bool = False
) -> Scaling:
    """Return where the values of a reduction are scaled: before, inside or after the transport.

    An exact sum of integers is divided only when it is decoded, so that it is rounded only once. In all other cases the
    function ``scaling`` decides. ``size`` is the number of ranks; ``joined`` says that some of them may have joined.
    """
    if isinstance(compressor, Exact):
        return Scaling(spec.prescale, spec.postscale)
    return scaling(capabilities, spec, compressor.wire_dtype(spec.dtype), size, joined)


def _parts(fused: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """Return consecutive parts of the buffer ``fused``. Part i has ``counts[i]`` elements."""
    parts, address = [], fused.address
    for count in counts:
        parts.append(Buffer(address, count, fused.dtype, (count,), owner=fused.owner))
        address += count * fused.dtype.itemsize
    return parts
