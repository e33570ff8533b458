"""Runs one bucket: copies its tensors into transport memory if necessary, calls the transport, writes the results.

This module averages, scales, casts and fuses tensors, unless the transport's capabilities say that the transport does
this.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.device import Event
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.memory import view
from ddlcore.contracts.transport import Capabilities, Memory, Plan, Prepared, Transport, Work
from ddlcore.errors import DdlInternalError, TransportError
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.runtime.encoding import encode, encode_once, settle
from ddlcore.runtime.integers import Exact, is_exact
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.process_sets import Communicator, ProcessSets
from ddlcore.runtime.request import Entry
from ddlcore.runtime.scaling import Scaling, reduction, scaling
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.sharded import Sharder
from ddlcore.runtime.waiter import Waited
from ddlcore.types import Buffer, DType, Kind, ReduceOp

Deliver = Callable[[], list[Outcome | None]]


@dataclass(frozen=True)
class Later:
    """A bucket that is queued on a device and may turn out void.

    Call ``deliver`` only when the bucket is known to be valid. There are two ways to know this. First, ``event`` shows
    that the device completed the bucket before this rank froze. Second, ``told`` is True: then the host of every member
    has said that it launched this bucket with real data. In the second case, every earlier bucket of the same process
    set is valid too.
    """

    event: Event
    deliver: Deliver
    told: bool = False


class Staged:
    """A function that delivers the results of a bucket.

    If the bucket turns out void, ``void()`` is called, and this function is not. ``void()`` undoes the changes that
    running the bucket made.
    """

    def __init__(self, deliver: Deliver, void: Callable[[], None]) -> None:
        self._deliver = deliver
        self.void = void

    def __call__(self) -> list[Outcome | None]:
        return self._deliver()


HostRun = Callable[[Launch[Entry], str], Deliver]
Run = Callable[[Launch[Entry], str], Deliver | Later]

WAIT_SLICE_S = 1.0
PREPARED_LIMIT = 4096


class Unserved(TransportError):
    """Raised if a transport or a compressor cannot do an operation. The operation fails, and the job continues.

    Every rank raises it for the same operation.
    """


def divisor_of(communicator: Communicator, bucket: Bucket) -> int:
    """Return by how many ranks an average of the negotiated ``bucket`` divides: fewer than all while some have joined."""
    return bucket.contributors or len(communicator.ranks)


def reducescatter_rows(rows: int, size: int) -> list[int]:
    """Return the number of rows that each of ``size`` ranks gets if ``rows`` rows are divided among them.

    The first ``rows % size`` ranks get one row more than the others.
    """
    return [rows // size + (rank < rows % size) for rank in range(size)]


class HostExecutor:
    """Runs buckets whose tensors are in host memory. Only the thread that runs buckets uses this object.

    ``compressor(name)`` returns the compressor that has this name.
    """

    def __init__(
        self,
        sets: ProcessSets,
        kernels: Kernels,
        compressor: Callable[[str], Compressor],
        meter: Meter,
    ) -> None:
        self._meter = meter
        self._sets = sets
        self._kernels = kernels
        self._compressor = compressor
        self._prepared: dict[tuple[int, Plan], Prepared] = {}
        self._sharder = Sharder(kernels, meter, _finish)
        self._run = {
            Kind.ALLREDUCE: self._allreduce,
            Kind.ALLGATHER: self._allgather,
            Kind.BROADCAST: self._broadcast,
            Kind.ALLTOALL: self._alltoall,
            Kind.REDUCESCATTER: self._reducescatter,
        }

    def execute_on_host(
        self, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        """Run a negotiated bucket together with the other ranks, and return one outcome for each entry.

        ``specs`` are the specs of the bucket's tensors. An entry is None if this rank has joined.
        """
        if bucket.kind is Kind.BARRIER:
            _finish(self._sets.communicator(bucket.set_id).transport.barrier())
            return [None]
        for entry in entries:
            if entry is not None and entry.source is not None and entry.source.wait is not None:
                entry.source.wait()
        return self._run[bucket.kind](self._sets.communicator(bucket.set_id), bucket, entries, specs)

    def arranged_on_host(self, planned: Planned, specs: Sequence[Spec]) -> HostRun:
        """Return a function that runs the bucket ``planned`` of a schedule.

        ``Dispatcher.replay`` calls that function each time the bucket is launched. ``specs`` are the specs of the
        bucket's tensors.
        """
        communicator = self._sets.communicator(planned.set_id)
        if planned.negotiated:
            return partial(self._run_negotiated_slot, communicator, specs)
        if planned.kind is Kind.BARRIER:
            return partial(_run_barrier, communicator)
        if planned.kind is Kind.ALLREDUCE:
            prepared = self._atomic(communicator, specs)
            if prepared is not None:
                resumable = communicator.transport.capabilities_for(planned.kind).resumable
                return AtomicAllreduce(prepared, len(specs), resumable)
        return partial(self._run_packed, communicator, specs)

    def _run_negotiated_slot(
        self, communicator: Communicator, specs: Sequence[Spec], launch: Launch[Entry], use: str
    ) -> Deliver:
        assert launch.bucket is not None and launch.entries is not None
        outcomes = self.execute_on_host(launch.bucket, launch.entries, specs)
        _finish(communicator.transport.barrier())
        return partial(same, outcomes)

    def _run_packed(
        self, communicator: Communicator, specs: Sequence[Spec], launch: Launch[Entry], use: str
    ) -> Deliver:
        """Run a bucket of a schedule, and return the function that delivers its results.

        The results stay in transport memory until the bucket is known to be valid. ``use`` names the fusion buffer.
        """
        planned = launch.planned
        entries: Sequence[Entry | None] = launch.entries if launch.entries is not None else [None] * len(specs)
        for entry in entries:
            if entry is not None and entry.source is not None and entry.source.wait is not None:
                entry.source.wait()
        if planned.kind is Kind.ALLREDUCE:
            divisor = len(communicator.ranks)  # no schedule runs while a rank has joined
            deliver = self._allreduce_packed(communicator, planned.names, entries, specs, use, divisor)
            if any(prod(spec.shape) for spec in specs):
                return deliver  # no rank has the sum before all ranks have entered
        elif planned.kind is Kind.BROADCAST:
            deliver = self._replay_broadcast(communicator, entries[0], specs[0], use)
        else:
            rows = tuple(self._rows(communicator, planned.kind, entry) for entry in entries)
            bucket = Bucket(-1, planned.set_id, planned.kind, planned.names, rows)
            deliver = partial(same, self._run[planned.kind](communicator, bucket, entries, specs))
        # A broadcast may return on its root before any other rank has entered, and any collective may on a rank that
        # receives nothing. A bucket that has returned may be delivered, so it must not turn out void on other ranks
        # afterwards. The barrier makes sure that it returns only after all members have entered.
        _finish(communicator.transport.barrier())
        return deliver

    def _atomic(self, communicator: Communicator, specs: Sequence[Spec]) -> Prepared | None:
        """Return a prepared atomic allreduce: it writes no result unless all ranks take part with real data.

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
        _require(communicator, Kind.ALLREDUCE, spec.dtype, op)
        return self._prepare(communicator, Plan(counts, spec.dtype, op, spec.prescale, postscale))

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

    def _replay_broadcast(self, communicator: Communicator, entry: Entry | None, spec: Spec, use: str) -> Deliver:
        root = communicator.ranks.index(spec.root)
        copy = communicator.buffers.get(use, prod(spec.shape), spec.dtype)
        if entry is not None and communicator.rank == root:
            begun_ns = now_ns()
            self._copy(entry.source, copy)
            self._meter.pack_ns += now_ns() - begun_ns
        _finish(communicator.transport.broadcast(copy, root))

        def deliver() -> list[Outcome | None]:
            if entry is not None:
                assert entry.target is not None
                begun_ns = now_ns()
                self._copy(copy, entry.target)
                self._meter.unpack_ns += now_ns() - begun_ns
            return [None]

        return deliver

    def reopened(self) -> None:
        """Drop all prepared operations, because all communicators were closed and opened anew."""
        self._prepared.clear()

    def forget(self, set_id: int) -> None:
        """Drop all prepared operations of process set ``set_id``, which is removed."""
        self._prepared = {key: prepared for key, prepared in self._prepared.items() if key[0] != set_id}

    # --- allreduce

    def _traveling(self, spec: Spec, size: int) -> Compressor:
        """Return the compressor that encodes tensors with ``spec`` for the transport and decodes the result.

        ``size`` is the number of ranks that take part.
        """
        compressor = self._compressor(spec.compressor)
        if is_exact(spec, size) and compressor.wire_dtype(spec.dtype) is spec.dtype:
            return Exact(self._kernels, spec, size)
        return compressor

    def _allreduce(
        self, communicator: Communicator, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        spec, divisor = specs[0], divisor_of(communicator, bucket)
        op, postscale = reduction(spec, divisor)
        compressor = self._traveling(spec, divisor)
        capabilities = communicator.transport.capabilities_for(Kind.ALLREDUCE)
        unscaled = spec.prescale == 1.0 and postscale == 1.0
        plain = compressor.wire_dtype(spec.dtype) is spec.dtype and not isinstance(compressor, Exact)
        # A rank that has joined contributes the identity element, which a prescale inside the transport would change.
        # So such a bucket is packed, and the identity is written after the scaling.
        if not (capabilities.vectored and plain and (unscaled or (capabilities.scales and not bucket.specs))):
            return self._allreduce_packed(communicator, bucket.names, entries, specs, "fusion", divisor, joined=True)()
        _require(communicator, Kind.ALLREDUCE, spec.dtype, op)
        pairs = [self._pair(entry, s, op) for entry, s in zip(entries, specs)]
        plan = Plan(tuple(source.count for source, _ in pairs), spec.dtype, op, spec.prescale, postscale)
        _finish(self._prepare(communicator, plan).start([s.address for s, _ in pairs], [t.address for _, t in pairs]))
        return [None] * len(entries)

    def _pair(self, entry: Entry | None, spec: Spec, op: ReduceOp) -> tuple[Buffer, Buffer]:
        """Return the source and the target of one tensor.

        If ``entry`` is None, this rank does not have the tensor. Then source and target are the same dummy memory,
        whose values do not change the result of the operation.
        """
        if entry is not None:
            assert entry.source is not None and entry.target is not None
            return entry.source, entry.target
        dummy = _memory(prod(spec.shape), spec.dtype)
        self._kernels.fill_identity(dummy.address, dummy.count, spec.dtype, op)
        return dummy, dummy

    def _prepare(self, communicator: Communicator, plan: Plan) -> Prepared:
        return prepared(self._prepared, (communicator.set_id, plan), communicator.transport, plan)

    def _allreduce_packed(
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
        _require(communicator, Kind.ALLREDUCE, wire, op)
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
            _finish(self._prepare(communicator, plan).start([fused.address], [fused.address]))
        else:
            _finish(communicator.transport.allreduce(fused, fused, op))
        return parts

    # --- the other collectives

    def _rows(self, communicator: Communicator, kind: Kind, entry: Entry | None) -> tuple[tuple[int, ...], ...]:
        """Exchange the numbers of rows of a ragged tensor with the other ranks, and return the numbers of all ranks.

        Item [r] of the result is from rank r. It is (rows,) for an allgather, and the number of rows for each rank for
        an alltoall. A rank that takes part with dummy data has no ``entry`` and announces 0 rows. For other kinds of
        collectives, nothing is exchanged and the result is empty.
        """
        if not kind.is_ragged:
            return ()
        size, me = len(communicator.ranks), communicator.rank
        columns = size if kind is Kind.ALLTOALL else 1
        mine = entry.rows if entry is not None else (0,) * columns
        source = communicator.buffers.get("rows", columns, DType.I64)
        target = communicator.buffers.get("all rows", size * columns, DType.I64)
        view(source.address, source.nbytes)[:] = array("q", mine).tobytes()
        _finish(communicator.transport.allgatherv(source, target, (columns,) * size))
        told = view(target.address, target.nbytes).cast("q").tolist()
        rows = tuple(tuple(told[r * columns : (r + 1) * columns]) for r in range(size))
        # The code below reads and writes as much memory as these numbers say, so they are checked first.
        if rows[me] != tuple(mine) or min(told) < 0:
            raise TransportError(f"the transport delivered wrong sizes: {rows} where this rank announced {mine}")
        return rows

    def _allgather(
        self, communicator: Communicator, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = []
        for i, (entry, spec) in enumerate(zip(entries, specs)):
            row = prod(spec.shape)  # elements of one row
            counts = [rows[0] * row for rows in bucket.rows[i]]
            source = entry.source if entry is not None else _memory(0, spec.dtype)
            assert source is not None
            target = _memory(sum(counts), spec.dtype)
            _finish(communicator.transport.allgatherv(source, target, counts))
            outcomes.append(_outcome(bucket, i, target))
        return outcomes

    def _broadcast(
        self, communicator: Communicator, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        for entry, spec in zip(entries, specs):
            root = communicator.ranks.index(spec.root)
            target = entry.target if entry is not None else _memory(prod(spec.shape), spec.dtype)
            assert target is not None
            if entry is not None and communicator.rank == root:
                self._copy(entry.source, target)
            _finish(communicator.transport.broadcast(target, root))
        return [None] * len(entries)

    def _alltoall(
        self, communicator: Communicator, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = []
        for i, (entry, spec) in enumerate(zip(entries, specs)):
            row = prod(spec.shape)
            counts = [[rows * row for rows in sent] for sent in bucket.rows[i]]  # [from][to]
            source = entry.source if entry is not None else _memory(0, spec.dtype)
            assert source is not None
            target = _memory(sum(sent[communicator.rank] for sent in counts), spec.dtype)
            _finish(communicator.transport.alltoallv(source, target, counts))
            outcomes.append(_outcome(bucket, i, target))
        return outcomes

    def _reducescatter(
        self, communicator: Communicator, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = []
        divisor = divisor_of(communicator, bucket)
        for entry, spec in zip(entries, specs):
            op, _ = reduction(spec, divisor)
            compressor = self._traveling(spec, divisor)
            wire = compressor.wire_dtype(spec.dtype)
            scales = _scaling(compressor, None, spec, divisor)
            _require(communicator, Kind.REDUCESCATTER, wire, op)
            words = compressor.words if isinstance(compressor, Exact) else 1
            plain = wire is spec.dtype and not isinstance(compressor, Exact)
            row = prod(spec.shape[1:]) * words
            counts = [rows * row for rows in reducescatter_rows(spec.shape[0], len(communicator.ranks))]
            source, _ = self._pair(entry, spec, op) if entry is None else (entry.source, None)
            assert source is not None
            if entry is not None and (scales.encode != 1.0 or not plain):
                scaled = communicator.buffers.get("scatter", source.count * words, wire)
                encode_once(compressor, source, scaled, scales.encode)
                source = scaled
            elif not plain:
                source = communicator.buffers.get("scatter", source.count * words, wire)
                self._kernels.fill_identity(source.address, source.count, wire, op)
            mine = counts[communicator.rank]
            target = _memory(mine // words, spec.dtype)
            part = target if plain else communicator.buffers.get("part", mine, wire)
            _finish(communicator.transport.reducescatterv(source, part, counts, op))
            if entry is not None and (part is not target or scales.decode != 1.0):
                compressor.decode(entry.name, part, target, scales.decode)
            outcomes.append(Outcome(_owner(target)))
        return outcomes

    def _copy(self, source: Buffer | None, target: Buffer) -> None:
        if source is not None and source.address != target.address and source.count:
            self._kernels.pack([source.address], [source.count], source.dtype, target.address, source.dtype)


def prepared(known: dict[Any, Prepared], key: object, transport: Transport, plan: Plan) -> Prepared:
    """Return the prepared operation that ``known`` contains under ``key``.

    If there is none, ``transport`` prepares ``plan``, and the prepared operation is stored in ``known``.
    """
    found = known.get(key)
    if found is None:
        if len(known) >= PREPARED_LIMIT:  # shapes that are never used again must not fill the memory
            known.clear()
        found = known[key] = transport.prepare(plan)
    return found


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


def _require(communicator: Communicator, kind: Kind, dtype: DType, op: ReduceOp) -> None:
    capabilities = communicator.transport.capabilities_for(kind)
    if dtype not in capabilities.dtypes or op not in capabilities.ops:
        name = communicator.route.serving(kind).name
        raise Unserved(f"transport {name} does not reduce {dtype.label} by {op.name.lower()}; use another --backend")


def _memory(count: int, dtype: DType) -> Buffer:
    memory = Memory(count * dtype.itemsize)
    return Buffer(memory.address, count, dtype, (count,), owner=memory)


def _owner(buffer: Buffer) -> Memory:
    assert isinstance(buffer.owner, Memory)
    return buffer.owner


def _outcome(bucket: Bucket, i: int, target: Buffer) -> Outcome:
    digests = bucket.digests[i] if bucket.digests else ()
    return Outcome(_owner(target), rows=bucket.rows[i], digests=digests, contributors=bucket.contributors)


def _parts(fused: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """Return consecutive parts of the buffer ``fused``. Part i has ``counts[i]`` elements."""
    parts, address = [], fused.address
    for count in counts:
        parts.append(Buffer(address, count, fused.dtype, (count,), owner=fused.owner))
        address += count * fused.dtype.itemsize
    return parts


def _run_barrier(communicator: Communicator, launch: Launch[Entry], use: str) -> Deliver:
    _finish(communicator.transport.barrier())
    return partial(same, [None])


class AtomicAllreduce:
    """A function that runs an atomic allreduce in replay, in place.

    Either all ranks get the results, or the tensors of all ranks stay unchanged. In the second case the bucket is void.
    """

    __slots__ = ("_prepared", "done", "resumable")

    def __init__(self, prepared: Prepared, tensors: int, resumable: bool) -> None:
        self._prepared = prepared
        self.done: Deliver = partial(same, [None] * tensors)
        self.resumable = resumable  # whether a user thread may run it, which Ctrl-C may interrupt

    def __call__(self, launch: Launch[Entry], use: str) -> Deliver:
        if launch.entries is None:
            self._prepared.run_atomic((), (), False)
            return void
        sources, targets = _addresses(launch.entries)
        return self.done if self._prepared.run_atomic(sources, targets, True) else void

    def resume(self, launch: Launch[Entry], operation: Waited | None = None) -> Deliver | None:
        """Begin to run the bucket, or continue after an interruption. Return the bucket's deliver function.

        This method may be called again for the same launch, also on another thread. ``operation`` is the operation for
        which the calling thread waits. Return None if ``operation`` ended before the bucket could be entered.
        """
        assert launch.entries is not None
        sources, targets = _addresses(launch.entries)
        # A user thread may run this, and Ctrl-C may interrupt it at any moment. The launch number is the ticket: the
        # transport recognizes a repeated try for the same number. So the engine can continue with this launch, without
        # entering the bucket twice and without leaving the peers waiting in it.
        entered = None
        while entered is None:  # Ctrl-C may interrupt the thread between two tries
            entered = self._prepared.try_run_atomic(sources, targets, launch.number)
            if entered is None and operation is not None and not operation.pending:
                return None
        return self.done if entered else void


def _addresses(entries: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Wait until the source of each entry may be read. Return the addresses of all sources and of all targets."""
    for entry in entries:
        if entry.source.wait is not None:
            entry.source.wait()
    return [entry.source.address for entry in entries], [entry.target.address for entry in entries]


def void() -> list[Outcome | None]:
    """Raise DdlInternalError. This is the deliver function of a void atomic allreduce, and must never be called."""
    raise DdlInternalError("a void bucket was about to be handed over; please report this")


def same(outcomes: list[Outcome | None]) -> list[Outcome | None]:
    """Return ``outcomes``. This is the deliver function of a bucket whose results are already in the target memory."""
    return outcomes


def _finish(work: Work) -> None:
    while not work.wait(WAIT_SLICE_S):
        pass  # no deadline: a peer may just be slow, and abort() ends this wait
