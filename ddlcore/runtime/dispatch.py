"""Passes each bucket to the object that runs it: the executor of the host, the executor of the devices, or ProcessSets.

An executor runs the collective of a bucket. ProcessSets adds and removes process sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ddlcore.messages.coding import decode_spec
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.runtime.atomic_allreduce import AtomicAllreduce
from ddlcore.runtime.atomic_move import AtomicMove
from ddlcore.runtime.delivery import Deliver, Later
from ddlcore.runtime.executor import HostExecutor
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.ranges import Ranges, title
from ddlcore.runtime.request import Entry
from ddlcore.runtime.schedule import Launch, Run
from ddlcore.types import CPU, Kind


class OnDevices(Protocol):
    """An object that runs buckets whose tensors are on devices; see runtime/device/executor.py."""

    def execute(
        self, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]: ...

    def arranged(self, planned: Planned, specs: Sequence[Spec]) -> Run: ...


class RunsBuckets(Protocol):
    """What the engine calls to run a bucket: a Dispatcher, or an object around one.

    Only the thread that runs buckets makes these calls.
    """

    def execute(self, bucket: Bucket, entries: Sequence[Entry | None]) -> list[Outcome | None]:
        """Run a negotiated bucket; see ``Dispatcher.execute``."""

    def replay(self, launch: Launch[Entry], use: str) -> Deliver | Later:
        """Run a bucket of a schedule; see ``Dispatcher.replay``."""


class ShownDispatcher:
    """Runs buckets as ``dispatcher`` does, each within a profiler range that has the bucket's name."""

    def __init__(self, dispatcher: RunsBuckets, ranges: Ranges) -> None:
        self._dispatcher = dispatcher
        self._ranges = ranges

    def execute(self, bucket: Bucket, entries: Sequence[Entry | None]) -> list[Outcome | None]:
        with self._ranges(title(bucket)):
            return self._dispatcher.execute(bucket, entries)

    def replay(self, launch: Launch[Entry], use: str) -> Deliver | Later:
        with self._ranges(title(launch.bucket or launch.planned)):
            return self._dispatcher.replay(launch, use)


class Dispatcher:
    """Passes each bucket to the executor that can run it. Only the thread that runs buckets uses this object.

    ``devices`` returns the executor for tensors on devices; it is called only if there are such tensors.
    """

    def __init__(self, sets: ProcessSets, host: HostExecutor, devices: Callable[[], OnDevices]) -> None:
        self._sets = sets
        self._host = host
        self._devices = devices

    def execute(self, bucket: Bucket, entries: Sequence[Entry | None]) -> list[Outcome | None]:
        """Run a negotiated bucket together with the other ranks, and return one outcome for each entry.

        ``entries`` has one item for each tensor of the bucket. An item is None if this rank has joined and therefore
        did not ask for that tensor.
        """
        if bucket.kind is Kind.JOIN:
            return [Outcome(result=bucket.result)]
        if bucket.kind is Kind.ADD_SET:
            assert entries[0] is not None and entries[0].spec.ranks is not None
            self._sets.add(bucket.result, entries[0].spec.ranks)
            return [Outcome(result=bucket.result)]
        if bucket.kind is Kind.REMOVE_SET:
            self._host.forget(bucket.result)
            self._sets.remove(bucket.result)
            return [Outcome(result=bucket.result)]
        if bucket.kind is Kind.BARRIER:
            return self._host.execute_on_host(bucket, entries, ())
        specs = [e.spec if e is not None else decode_spec(bucket.specs[i]) for i, e in enumerate(entries)]
        if bucket.compressor:
            specs = [msgspec.structs.replace(spec, compressor=bucket.compressor) for spec in specs]
        if specs[0].device != CPU.kind:
            return self._devices().execute(bucket, entries, specs)
        return self._host.execute_on_host(bucket, entries, specs)

    def replay(self, launch: Launch[Entry], use: str) -> Deliver | Later:
        """Run a bucket of a schedule together with the other ranks, but do not change the user's tensors yet.

        Return the function that delivers the results to the tensors, or a Later, which contains that function. The
        function must be called only when it is known that the bucket is not void. ``use`` names the fusion buffer in
        which the results are kept until then.
        """
        position = launch.position
        run = position.run
        if run is None:
            run = position.run = self._arranged(launch.planned)
            position.resumable = run if isinstance(run, AtomicAllreduce | AtomicMove) and run.resumable else None
            specs = [decode_spec(spec) for spec in launch.planned.specs]
            ragged = launch.planned.kind.is_ragged and any(spec.rows is None for spec in specs)
            position.nbytes = -1 if ragged else sum(spec.nbytes(spec.rows or ()) for spec in specs)
        return run(launch, use)

    def _arranged(self, planned: Planned) -> Run:
        """Return a function that runs the bucket ``planned`` in each step.

        Everything that is equal in all steps is computed here, once.
        """
        specs = [decode_spec(spec) for spec in planned.specs]
        if planned.compressor:
            specs = [msgspec.structs.replace(spec, compressor=planned.compressor) for spec in specs]
        if specs[0].device != CPU.kind:
            return self._devices().arranged(planned, specs)
        return self._host.arranged_on_host(planned, specs)
