"""Stages a bucket of device tensors on the host: copies to pinned memory, runs the host's transport, and copies back.

The host waits for the copy to pinned memory. It does not wait for the copy back, which is only queued on the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from ddlcore.contracts.transport import Memory
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.runtime.delivery import Deliver, Staged, void
from ddlcore.runtime.device.devices import DeviceStream
from ddlcore.runtime.device.routes import OnDevice
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import Entry
from ddlcore.runtime.schedule import HostRun, Launch
from ddlcore.types import Buffer, Kind

Entries = Sequence[Entry | None]
Outcomes = list[Outcome | None]


class HostRuns(Protocol):
    """An object that runs buckets of tensors in host memory; see runtime/executor.py."""

    def execute_on_host(self, bucket: Bucket, entries: Entries, specs: Sequence[Spec]) -> Outcomes: ...

    def arranged_on_host(self, planned: Planned, specs: Sequence[Spec]) -> HostRun: ...


@dataclass
class _Below:
    """The copies of a bucket's tensors in pinned host memory, and entries for these copies.

    An entry is None if this rank does not have that tensor. ``nbytes`` is the total size of the copies.
    """

    entries: list[Entry | None]
    pinned: Memory
    nbytes: int


class Staging:
    """Runs buckets of device tensors in host memory. ``host`` runs the buckets on copies of their tensors."""

    def __init__(self, host: HostRuns) -> None:
        self._host = host

    def execute(self, route: OnDevice, bucket: Bucket, entries: Entries, specs: Sequence[Spec]) -> Outcomes:
        """Run a negotiated bucket of device tensors on the host, and return one outcome for each entry."""
        below = self._down(route, bucket.kind, entries)
        return self._up(route, bucket.kind, entries, below, self._host.execute_on_host(bucket, below.entries, specs))

    def arranged(self, route: OnDevice, planned: Planned, specs: Sequence[Spec]) -> HostRun:
        """Return a function that runs the bucket ``planned`` of a schedule in host memory.

        That function first copies the tensors to the host. It returns a deliver function, which copies the results
        back.
        """
        inner = self._host.arranged_on_host(planned, specs)

        def run(launch: Launch[Entry], use: str) -> Deliver:
            entries = launch.entries
            if entries is None:
                return inner(launch, use)
            below = self._down(route, planned.kind, entries)
            mirrored = Launch(launch.place, launch.position, _present(below), launch.bucket, launch.number)
            deliver = inner(mirrored, use)
            if deliver is void:
                route.stream.pinned.give(below.pinned)
                return void

            def up() -> Outcomes:
                return self._up(route, planned.kind, entries, below, deliver())

            return Staged(up, deliver.void) if isinstance(deliver, Staged) else up

        return run

    def _down(self, route: OnDevice, kind: Kind, entries: Entries) -> _Below:
        """Copy this rank's tensors to pinned host memory, and wait for the copy.

        For a broadcast, only the root copies its tensor, because the other ranks' values are not used.
        """
        stream = route.stream
        present = [entry for entry in entries if entry is not None]
        buffers = [_source(entry) for entry in present]
        nbytes = sum(buffer.nbytes for buffer in buffers)
        pinned = stream.pinned.take(nbytes)
        own_rank = route.host.ranks[route.host.rank]
        if nbytes and (kind is not Kind.BROADCAST or present[0].spec.root == own_rank):
            stream.after(buffers)
            self._move_down(stream, kind, buffers, pinned)
            stream.wait(stream.mark([*(buffer.owner for buffer in buffers), pinned]))
        places = iter(_offsets(buffers))
        mirrored = [None if e is None else _mirror(e, pinned, pinned.address + next(places)) for e in entries]
        return _Below(mirrored, pinned, nbytes)

    def _move_down(self, stream: DeviceStream, kind: Kind, buffers: Sequence[Buffer], pinned: Memory) -> None:
        if kind is Kind.ALLREDUCE and len(buffers) > 1:  # all of one type
            dtype, nbytes = buffers[0].dtype, sum(buffer.nbytes for buffer in buffers)
            together = stream.pool.take(nbytes)
            sources, counts = [buffer.address for buffer in buffers], [buffer.count for buffer in buffers]
            stream.kernels.pack(sources, counts, dtype, together.address, dtype)
            stream.queue.copy(together.address, pinned.address, nbytes)
            stream.pool.give(together)
            return
        for at, buffer in zip(_offsets(buffers), buffers):
            if buffer.count:
                stream.queue.copy(buffer.address, pinned.address + at, buffer.nbytes)

    def _up(self, route: OnDevice, kind: Kind, entries: Entries, below: _Below, outcomes: Outcomes) -> Outcomes:
        """Queue the copy of the results from the host to the device, and return one outcome for each entry.

        The results of allreduce and broadcast are copied to the user's targets, other results to new device memory.
        """
        stream = route.stream
        if kind not in (Kind.ALLREDUCE, Kind.BROADCAST):
            stream.pinned.give(below.pinned)
            pairs = zip(entries, outcomes)
            return [one if e is None or one is None else self._lifted(stream, one) for e, one in pairs]
        present = [entry for entry in entries if entry is not None]
        targets = [_target(entry) for entry in present]
        if below.nbytes:
            stream.after([*map(_source, present), *targets])
            self._move_up(stream, targets, below)
        event = stream.mark([*(_source(one).owner for one in present), *(one.owner for one in targets), below.pinned])
        stream.pinned.give(below.pinned, event)
        return [Outcome(event=event)] * len(entries)

    def _move_up(self, stream: DeviceStream, targets: Sequence[Buffer], below: _Below) -> None:
        if len(targets) == 1:
            stream.queue.copy(below.pinned.address, targets[0].address, below.nbytes)
            return
        dtype = targets[0].dtype
        together = stream.pool.take(below.nbytes)
        stream.queue.copy(below.pinned.address, together.address, below.nbytes)
        places, counts = [target.address for target in targets], [target.count for target in targets]
        stream.kernels.unpack(together.address, dtype, places, counts, dtype)
        stream.pool.give(together)

    def _lifted(self, stream: DeviceStream, outcome: Outcome) -> Outcome:
        """Copy a result from host memory to new device memory, and return an outcome with the device memory."""
        memory = outcome.memory
        assert memory is not None
        nbytes = memory.nbytes
        pinned, lifted = stream.pinned.take(nbytes), stream.runtime.allocate(max(nbytes, 1))
        if nbytes:
            ctypes.memmove(pinned.address, memory.address, nbytes)
            stream.queue.copy(pinned.address, lifted.address, nbytes)
        event = stream.mark([pinned, lifted])
        stream.pinned.give(pinned, event)
        return Outcome(lifted, outcome.rows, outcome.digests, -1, outcome.contributors, event)


def _present(below: _Below) -> list[Entry]:
    return [entry for entry in below.entries if entry is not None]


def _source(entry: Entry) -> Buffer:
    assert entry.source is not None
    return entry.source


def _target(entry: Entry) -> Buffer:
    assert entry.target is not None
    return entry.target


def _offsets(buffers: Sequence[Buffer]) -> list[int]:
    return [0, *accumulate(buffer.nbytes for buffer in buffers)][: len(buffers)]


def _mirror(entry: Entry, pinned: Memory, address: int) -> Entry:
    """Return an entry for the same operation as ``entry``, but on the copy of the tensor in pinned host memory.

    The copy is at ``address``. The new entry works in place on this copy.
    """
    source = _source(entry)
    copy = Buffer(address, source.count, source.dtype, source.shape, source.strides, owner=pinned)
    target = copy if entry.target is not None else None
    return Entry(
        entry.handle,
        entry.number,
        entry.set_id,
        entry.name,
        entry.spec,
        entry.spec_bytes,
        copy,
        target,
        entry.rows,
        entry.digest,
    )
