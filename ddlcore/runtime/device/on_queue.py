"""Puts the work of one bucket on the queue of its device.

The work runs after the events of the bucket's tensors. Another event shows when the work is done. There are three
methods; each of them only queues work. ``pack`` reads the user's tensors and writes transport memory. ``run`` calls the
transport and writes the user's tensors. If it is not yet known whether all ranks take part with real data,
``run_apart`` is called instead of ``run``. It uses the transport only on transport memory, and returns a function that
writes the user's tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from operator import is_
from typing import cast

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.transport import Memory, Plan, Prepared, Transport
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket
from ddlcore.runtime.delivery import Later, Staged
from ddlcore.runtime.device.devices import DeviceStream, Pool
from ddlcore.runtime.device.routes import OnDevice
from ddlcore.runtime.encoding import encode, encode_once, settle
from ddlcore.runtime.host_reductions import reducescatter_rows
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import Entry
from ddlcore.runtime.scaling import divisor_of, reduction
from ddlcore.runtime.transport_calls import prepared
from ddlcore.types import Buffer, DType, Kind, ReduceOp

Entries = Sequence[Entry | None]
Outcomes = list[Outcome | None]
HALVES = (DType.F16, DType.BF16)


class _Tensors:
    """Lists of the sources and targets of a bucket's entries, made only once: a bucket may have hundreds of entries."""

    __slots__ = ("all", "sources", "targets", "whole")

    def __init__(self, entries: Entries) -> None:
        sources, targets = [], []
        with suppress(AttributeError):  # checking each entry first would cost more than this exception
            sources = [entry.source for entry in cast("Sequence[Entry]", entries)]
            targets = [entry.target for entry in cast("Sequence[Entry]", entries)]
        self.whole = len(targets) == len(entries)  # no entry is None
        if not self.whole:
            present = [entry for entry in entries if entry is not None]
            sources, targets = [entry.source for entry in present], [entry.target for entry in present]
        self.sources = cast("list[Buffer]", sources)  # each entry has a source
        self.targets = cast("list[Buffer]", [] if None in targets[:1] else targets)  # all have a target or none
        in_place = len(self.targets) == len(self.sources) and all(map(is_, self.sources, self.targets))
        self.all = self.sources if in_place else self.sources + self.targets

    def owners(self) -> list[object]:
        return [buffer.owner for buffer in self.all]


class Queued(ABC):
    """An object that puts the work of one bucket on the queue of a device.

    If the bucket is part of a schedule, the object is used again in each period (each pass through the schedule).
    ``specs`` are the specs of the bucket's tensors.
    """

    def __init__(self, route: OnDevice, specs: Sequence[Spec]) -> None:
        assert route.transport is not None and route.pool is not None
        self.stream: DeviceStream = route.stream
        self.route = route
        self.transport: Transport = route.transport
        self.pool: Pool = route.pool
        self.specs = specs
        self._tensors = _Tensors(())

    def pack(self, entries: Entries) -> None:
        """Make the queue wait for the user's tensors, and copy the tensors to transport memory if that is needed.

        After this call the bucket may still turn out void. Then the entries become pending again.
        """
        self._tensors = tensors = _Tensors(entries)
        self.stream.after(tensors.all)

    def forget(self) -> None:
        """Release the tensors of the last call of ``pack``.

        Without this, the tensors would stay alive until the next pass through the schedule, in which this object is
        used again.
        """
        self._tensors = _Tensors(())

    def void(self, entries: Entries) -> None:
        """Undo the changes that ``pack`` has made, because the bucket is void."""

    @abstractmethod
    def run(self, entries: Entries) -> Outcomes:
        """Run the bucket on the user's tensors, and return one outcome for each entry.

        The executor calls this only if every rank takes part with real data or has joined. An entry is None if this
        rank has joined.
        """

    def run_apart(self, entries: Entries) -> Later:
        """Run the bucket in transport memory only. Return a Later, by which the results are delivered to the tensors.

        All entries are None if this rank takes part with dummy data.
        """
        outcomes = self.run(entries)  # ``run`` writes to fresh memory here, so nothing of the user's changes
        events = [outcome.event for outcome in outcomes if outcome is not None and outcome.event is not None]
        return Later(events[-1], lambda: outcomes)

    def _done(self, *kept: object) -> Outcome:
        """Return an outcome with an event that is done when all work that has been queued so far has run.

        The bucket's tensors and the objects in ``kept`` stay alive until this event is done.
        """
        return Outcome(event=self.stream.mark((self._tensors.owners(), kept)))

    def _fresh(self, count: int, dtype: DType) -> Buffer:
        """Allocate device memory for ``count`` elements of ``dtype``. This memory will become a tensor of the user."""
        memory = self.stream.runtime.allocate(max(count * dtype.itemsize, 1))
        return Buffer(memory.address, count, dtype, (count,), device=self.stream.device, owner=memory)

    def _taken(self, count: int, dtype: DType) -> Buffer:
        memory = self.pool.take(count * dtype.itemsize)
        return Buffer(memory.address, count, dtype, (count,), device=self.stream.device, owner=memory)

    def _give(self, *buffers: Buffer | None) -> None:
        for buffer in buffers:
            if buffer is not None:
                assert isinstance(buffer.owner, Memory)
                self.pool.give(buffer.owner)


class _Allreduce(Queued):
    """An allreduce on a device's queue.

    ``again`` says that this object is used in each period of a schedule. ``joined`` says that some of the ranks may
    have joined: such a rank contributes the identity element, which scaling inside the transport would change. An average
    divides by ``divisor``.
    """

    def __init__(
        self,
        route: OnDevice,
        specs: Sequence[Spec],
        compressor: Compressor,
        again: bool,
        joined: bool,
        divisor: int,
    ) -> None:
        super().__init__(route, specs)
        spec, capabilities = specs[0], self.transport.capabilities_for(Kind.ALLREDUCE)
        self.counts = [prod(one.shape) for one in specs]
        self.count = sum(self.counts)
        self.compressor = compressor
        self.wire = compressor.wire_dtype(spec.dtype)
        self.op, self.post = reduction(spec, divisor)
        self.pre = spec.prescale
        self._fused: Buffer | None = None
        self._prepared: Prepared | None = None
        same_type = self.wire is spec.dtype
        scaled = self.pre != 1.0 or self.post != 1.0
        if capabilities.vectored and same_type and (not scaled or (capabilities.scales and not joined)):
            plan = Plan(tuple(self.counts), self.wire, self.op, self.pre, self.post)
            self._prepared = prepared(route.prepared, plan, self.transport, plan)
        elif spec.op is ReduceOp.Average:
            averages = ReduceOp.Average in capabilities.ops and divisor == len(route.host.ranks)
            if self.wire.is_float and averages:
                self.op, self.post = ReduceOp.Average, spec.postscale
            elif self.wire in HALVES:  # divide first, so that the sum cannot overflow
                self.pre, self.post = self.pre / divisor, spec.postscale
        self._single = len(specs) == 1 and same_type and self.pre == 1.0
        self._packed = self._prepared is None and not self._single
        if self._packed and compressor.casts and again:
            queue = self.stream.queue
            self._packer = queue.packer(self.counts, spec.dtype, self.wire, self.pre)
            self._unpacker = queue.unpacker(self.counts, spec.dtype, self.wire, self.post)
        else:
            self._packer, self._unpacker = self._pack_once, self._unpack_once

    def _pack_once(self, sources: Sequence[int], target: int) -> None:
        self.stream.kernels.pack(sources, self.counts, self.specs[0].dtype, target, self.wire, self.pre)

    def _unpack_once(self, source: int, targets: Sequence[int]) -> None:
        self.stream.kernels.unpack(source, self.wire, targets, self.counts, self.specs[0].dtype, self.post)

    def pack(self, entries: Entries) -> None:
        super().pack(entries)
        if not self._packed:
            return
        self._fused = fused = self._taken(self.count, self.wire)
        if self.compressor.casts and self._tensors.whole:
            self._packer([source.address for source in self._tensors.sources], fused.address)
            return
        for entry, part in zip(entries, self._parts(fused)):
            if entry is None:
                self._fill(part)
            else:
                encode(self.compressor, entry, _source(entry), part, self.pre)

    def void(self, entries: Entries) -> None:
        self._give(self._fused)
        self._fused = None
        if self._packed:
            settle(self.compressor, entries, False)
        self._done()  # the tensors are still being read

    def run(self, entries: Entries) -> Outcomes:
        if self._packed:
            fused, self._fused = self._fused, None
            assert fused is not None
            self.transport.allreduce(fused, fused, self.op)
            self._unpack(entries, self._tensors, fused)
        elif self._tensors.whole:
            self._reduce(self._tensors.sources, self._tensors.targets)
        else:
            absent = self._absent(entries)
            places = [(e.source, e.target) if e is not None else (part, part) for e, part in zip(entries, absent)]
            self._reduce([_given(source) for source, _ in places], [_given(target) for _, target in places])
            self._give(*absent)
        return [self._done()] * len(entries)

    def run_apart(self, entries: Entries) -> Later:
        fused, self._fused = self._fused or self._taken(self.count, self.wire), None
        tensors = self._tensors
        if self._packed:
            self.transport.allreduce(fused, fused, self.op)
        else:
            parts = self._parts(fused)
            self._reduce([_source(e) if e is not None else part for e, part in zip(entries, parts)], parts)

        def deliver() -> Outcomes:
            if self._packed:
                self._unpack(entries, tensors, fused)
            else:
                targets, dtype = [target.address for target in tensors.targets], self.specs[0].dtype
                self.stream.kernels.unpack(fused.address, dtype, targets, self.counts, dtype)
                self._give(fused)
            return [Outcome(event=self.stream.mark((tensors.owners(),)))] * len(entries)

        def void() -> None:
            settle(self.compressor, entries, False)
            self._give(fused)

        stateful = self._packed and not self.compressor.casts
        return Later(self.stream.mark((tensors.owners(), fused)), Staged(deliver, void) if stateful else deliver)

    def _reduce(self, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
        if self._prepared is not None:
            self._prepared.start([one.address for one in sources], [one.address for one in targets])
            return
        self.transport.allreduce(sources[0], targets[0], self.op)
        if self.post != 1.0:
            place, count, dtype = targets[0].address, self.counts[0], self.specs[0].dtype
            self.stream.kernels.reduce([place], place, count, dtype, ReduceOp.Sum, scale=self.post)

    def _unpack(self, entries: Entries, tensors: _Tensors, fused: Buffer) -> None:
        if self.compressor.casts and tensors.whole:
            self._unpacker(fused.address, [target.address for target in tensors.targets])
        else:
            for entry, part in zip(entries, self._parts(fused)):
                if entry is not None:
                    self.compressor.decode(entry.name, part, _given(entry.target), self.post)
            settle(self.compressor, entries, True)
        self._give(fused)

    def _absent(self, entries: Entries) -> list[Buffer | None]:
        """Return a list with one item for each entry: memory with the identity element if the entry is None, else None.

        An entry is None because this rank has joined and did not ask for that tensor.
        """
        absent = [None if e is not None else self._taken(count, self.wire) for e, count in zip(entries, self.counts)]
        for part in absent:
            if part is not None:
                self._fill(part)
        return absent

    def _fill(self, part: Buffer) -> None:
        op = ReduceOp.Sum if self.op is ReduceOp.Average else self.op
        self.stream.kernels.fill_identity(part.address, part.count, self.wire, op)

    def _parts(self, fused: Buffer) -> list[Buffer]:
        parts, address = [], fused.address
        for count in self.counts:
            parts.append(Buffer(address, count, self.wire, (count,), device=self.stream.device, owner=fused.owner))
            address += count * self.wire.itemsize
        return parts


class _Broadcast(Queued):
    def run(self, entries: Entries) -> Outcomes:
        for entry, spec in zip(entries, self.specs):
            root = self.route.host.ranks.index(spec.root)
            spare = self._taken(prod(spec.shape), spec.dtype) if entry is None else None
            target = spare if entry is None else entry.target
            if entry is not None and self.route.host.rank == root:
                self._copy(_source(entry), _given(target))
            self.transport.broadcast(_given(target), root)
            self._give(spare)
        return [self._done()] * len(entries)

    def run_apart(self, entries: Entries) -> Later:
        ((entry, spec),) = zip(entries, self.specs)  # broadcasts are never fused
        tensors = self._tensors
        root = self.route.host.ranks.index(spec.root)
        copy = self._taken(prod(spec.shape), spec.dtype)
        if entry is not None and self.route.host.rank == root:
            self._copy(_source(entry), copy)
        self.transport.broadcast(copy, root)

        def deliver() -> Outcomes:
            assert entry is not None
            self._copy(copy, _given(entry.target))
            self._give(copy)
            return [Outcome(event=self.stream.mark((tensors.owners(),)))]

        return Later(self.stream.mark((tensors.owners(), copy)), deliver)

    def _copy(self, source: Buffer, target: Buffer) -> None:
        if source.address != target.address and source.nbytes:
            self.stream.queue.copy(source.address, target.address, source.nbytes)


class _Ragged(Queued):
    """An allgather or alltoall on a device's queue. The negotiated sizes are in ``bucket``."""

    def __init__(self, route: OnDevice, specs: Sequence[Spec], bucket: Bucket) -> None:
        super().__init__(route, specs)
        self._bucket = bucket

    def run(self, entries: Entries) -> Outcomes:
        bucket, outcomes = self._bucket, Outcomes()
        for i, (entry, spec) in enumerate(zip(entries, self.specs)):
            row = prod(spec.shape)  # elements of one row
            source = _source(entry) if entry is not None else self._fresh(0, spec.dtype)
            if bucket.kind is Kind.ALLGATHER:
                counts = [rows[0] * row for rows in bucket.rows[i]]
                target = self._fresh(sum(counts), spec.dtype)
                self.transport.allgatherv(source, target, counts)
            else:
                sent = [[rows * row for rows in to] for to in bucket.rows[i]]  # [from][to]
                target = self._fresh(sum(to[self.route.host.rank] for to in sent), spec.dtype)
                self.transport.alltoallv(source, target, sent)
            assert isinstance(target.owner, Memory)
            event = self._done(source, target).event
            contributors = bucket.contributors
            outcomes.append(Outcome(target.owner, bucket.rows[i], (), -1, contributors, event))
        return outcomes


class _Reducescatter(Queued):
    def __init__(self, route: OnDevice, specs: Sequence[Spec], compressor: Compressor, divisor: int) -> None:
        super().__init__(route, specs)
        self.compressor = compressor
        self.divisor = divisor  # of an average

    def run(self, entries: Entries) -> Outcomes:
        return [self._scatter(entry, spec) for entry, spec in zip(entries, self.specs)]

    def _scatter(self, entry: Entry | None, spec: Spec) -> Outcome:
        size, compressor = len(self.route.host.ranks), self.compressor
        op, post = reduction(spec, self.divisor)
        pre, wire = spec.prescale, compressor.wire_dtype(spec.dtype)
        capabilities = self.transport.capabilities_for(Kind.REDUCESCATTER)
        averages = ReduceOp.Average in capabilities.ops and self.divisor == size
        if spec.op is ReduceOp.Average and wire.is_float and averages:
            op, post = ReduceOp.Average, spec.postscale
        elif spec.op is ReduceOp.Average and wire in HALVES:
            pre, post = pre / self.divisor, spec.postscale
        row = prod(spec.shape[1:])
        counts = [rows * row for rows in reducescatter_rows(spec.shape[0], size)]
        target = self._fresh(counts[self.route.host.rank], spec.dtype)
        spare: Buffer | None = None
        if entry is None:
            spare = source = self._taken(sum(counts), wire)
            neutral = ReduceOp.Sum if op is ReduceOp.Average else op
            self.stream.kernels.fill_identity(source.address, source.count, wire, neutral)
        elif pre != 1.0 or wire is not spec.dtype:
            spare = source = self._taken(sum(counts), wire)
            encode_once(compressor, _source(entry), source, pre)
        else:
            source = _source(entry)
        apart = wire is not spec.dtype or post != 1.0
        part = self._taken(target.count, wire) if apart else target
        self.transport.reducescatterv(source, part, counts, op)
        if entry is not None and apart:
            compressor.decode(entry.name, part, target, post)
        self._give(spare, part if apart else None)
        assert isinstance(target.owner, Memory)
        return Outcome(target.owner, event=self._done(target).event)


def queued(
    route: OnDevice,
    kind: Kind,
    specs: Sequence[Spec],
    compressor: Compressor,
    bucket: Bucket | None,
    again: bool,
) -> Queued:
    """Return the object that puts the work of one bucket on the queue of its device. ``kind`` is its operation.

    ``bucket`` is the negotiated bucket, or None for a bucket of a schedule whose sizes are fixed. ``again`` says that
    the returned object is used in each pass through a schedule.
    """
    divisor = len(route.host.ranks) if bucket is None else divisor_of(route.host, bucket)
    if kind is Kind.ALLREDUCE:
        return _Allreduce(route, specs, compressor, again, bucket is not None and bool(bucket.specs), divisor)
    if kind is Kind.BROADCAST:
        return _Broadcast(route, specs)
    if kind is Kind.REDUCESCATTER:
        return _Reducescatter(route, specs, compressor, divisor)
    assert bucket is not None
    return _Ragged(route, specs, bucket)


def _source(entry: Entry | None) -> Buffer:
    assert entry is not None and entry.source is not None
    return entry.source


def _given(buffer: Buffer | None) -> Buffer:
    assert buffer is not None
    return buffer
