"""Runs the buckets whose tensors are in host memory: negotiated ones, and those of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.runtime.delivery import Deliver, same
from ddlcore.runtime.host_moves import HostMoves
from ddlcore.runtime.host_reductions import HostReductions
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.process_sets import Communicator, ProcessSets
from ddlcore.runtime.request import Entry
from ddlcore.runtime.schedule import HostRun, Launch
from ddlcore.runtime.transport_calls import finish
from ddlcore.types import Kind


class HostExecutor:
    """Runs buckets whose tensors are in host memory. Only the thread that runs buckets uses this object.

    ``compressor(name)`` returns the compressor that has this name.
    """

    def __init__(
        self, sets: ProcessSets, kernels: Kernels, compressor: Callable[[str], Compressor], meter: Meter
    ) -> None:
        self._sets = sets
        self._reductions = reductions = HostReductions(kernels, compressor, meter)
        self._moves = moves = HostMoves(kernels, meter)
        self._run = {
            Kind.ALLREDUCE: reductions.allreduce,
            Kind.ALLGATHER: moves.allgather,
            Kind.BROADCAST: moves.broadcast,
            Kind.ALLTOALL: moves.alltoall,
            Kind.REDUCESCATTER: reductions.reducescatter,
        }
        # Attributes, to save a lookup for each bucket.
        self._reduce_packed, self._replay_broadcast = reductions.packed, moves.replay_broadcast
        self.forget, self.reopened = reductions.forget, reductions.reopened  # all that is kept belongs to reductions

    def execute_on_host(
        self, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        """Run a negotiated bucket together with the other ranks, and return one outcome for each entry.

        ``specs`` are the specs of the bucket's tensors. An entry is None if this rank has joined.
        """
        if bucket.kind is Kind.BARRIER:
            finish(self._sets.communicator(bucket.set_id).transport.barrier())
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
            atomic = self._reductions.atomic(communicator, specs)
            if atomic is not None:
                return atomic
        return partial(self._run_packed, communicator, specs)

    def _run_negotiated_slot(
        self, communicator: Communicator, specs: Sequence[Spec], launch: Launch[Entry], use: str
    ) -> Deliver:
        assert launch.bucket is not None and launch.entries is not None
        outcomes = self.execute_on_host(launch.bucket, launch.entries, specs)
        finish(communicator.transport.barrier())
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
            deliver = self._reduce_packed(communicator, planned.names, entries, specs, use, divisor)
            if any(prod(spec.shape) for spec in specs):
                return deliver  # no rank has the sum before all ranks have entered
        elif planned.kind is Kind.BROADCAST:
            deliver = self._replay_broadcast(communicator, entries[0], specs[0], use)
        else:
            rows = tuple(self._moves.rows(communicator, planned.kind, entry) for entry in entries)
            bucket = Bucket(-1, planned.set_id, planned.kind, planned.names, rows)
            deliver = partial(same, self._run[planned.kind](communicator, bucket, entries, specs))
        # A broadcast may return on its root before any other rank has entered, and any collective may on a rank that
        # receives nothing. A bucket that has returned may be delivered, so it must not turn out void on other ranks
        # afterwards. The barrier makes sure that it returns only after all members have entered.
        finish(communicator.transport.barrier())
        return deliver


def _run_barrier(communicator: Communicator, launch: Launch[Entry], use: str) -> Deliver:
    finish(communicator.transport.barrier())
    return partial(same, [None])
