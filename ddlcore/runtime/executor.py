"""Runs the buckets whose tensors are in host memory: negotiated ones, and those of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from math import prod

import msgspec

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.runtime.atomic_move import AtomicMove
from ddlcore.runtime.delivery import Deliver, same
from ddlcore.runtime.host_moves import Movement, movement
from ddlcore.runtime.host_reductions import HostReductions
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.process_sets import Communicator, ProcessSets
from ddlcore.runtime.request import Entry
from ddlcore.runtime.scaling import divisor_of
from ddlcore.runtime.schedule import HostRun, Launch
from ddlcore.runtime.transport_calls import finish
from ddlcore.runtime.vote import vote_of
from ddlcore.types import Kind


class HostExecutor:
    """Runs buckets whose tensors are in host memory. Only the thread that runs buckets uses this object.

    ``compressor(name)`` returns the compressor that has this name.
    """

    def __init__(
        self, sets: ProcessSets, kernels: Kernels, compressor: Callable[[str], Compressor], meter: Meter
    ) -> None:
        self._sets = sets
        self._reductions = HostReductions(kernels, compressor, meter)
        # Everything that is kept belongs to the reductions.
        self.forget, self.reopened = self._reductions.forget, self._reductions.reopened

    def execute_on_host(
        self, bucket: Bucket, entries: Sequence[Entry | None], specs: Sequence[Spec]
    ) -> list[Outcome | None]:
        """Run a negotiated bucket together with the other ranks, and return one outcome for each entry.

        ``specs`` are the specs of the bucket's tensors. An entry is None if this rank has joined.
        """
        communicator = self._sets.communicator(bucket.set_id)
        if bucket.kind is Kind.BARRIER:
            finish(communicator.transport.barrier())
            return [None]
        _wait(entries)
        if bucket.kind is Kind.ALLREDUCE:
            return self._reductions.allreduce(communicator, bucket, entries, specs)
        return [self._moved(communicator, bucket, i, entry, specs[i]) for i, entry in enumerate(entries)]

    def _moved(
        self, communicator: Communicator, bucket: Bucket, i: int, entry: Entry | None, spec: Spec
    ) -> Outcome | None:
        """Run the collective of tensor ``i`` of a negotiated bucket that is no allreduce, and return its outcome."""
        one = self._movement(bucket.kind, communicator, spec, divisor_of(communicator, bucket))
        one.begin(entry, list(chain.from_iterable(bucket.rows[i])) if bucket.rows else ())
        communicator.transport.prepare_move(one.move).run(one.source, one.target, one.counts, ticket=1)
        outcome = one.end(entry)
        if outcome is None or not bucket.rows:
            return outcome
        digests = bucket.digests[i] if bucket.digests else ()
        return msgspec.structs.replace(outcome, digests=digests, contributors=bucket.contributors)

    def _movement(self, kind: Kind, communicator: Communicator, spec: Spec, divisor: int) -> Movement:
        if kind is Kind.REDUCESCATTER:
            return self._reductions.reducescatter(communicator, spec, divisor)
        return movement(kind, communicator, spec)

    def arranged_on_host(self, planned: Planned, specs: Sequence[Spec]) -> HostRun:
        """Return a function that runs the bucket ``planned`` of a schedule.

        ``Dispatcher.replay`` calls that function each time the bucket is launched. ``specs`` are the specs of the
        bucket's tensors.
        """
        communicator = self._sets.communicator(planned.set_id)
        if planned.negotiated:
            return partial(self._run_negotiated_slot, communicator, specs)
        if planned.kind is Kind.ALLREDUCE:
            atomic = self._reductions.atomic(communicator, specs)
            return atomic if atomic is not None else partial(self._run_packed, communicator, specs)
        if planned.kind is Kind.BARRIER:
            vote = vote_of(communicator, 0)
            return AtomicMove(vote, None, None, vote.resumable)
        one = self._movement(planned.kind, communicator, specs[0], len(communicator.ranks))
        # What every rank would tell is known if all say the same in every call, or if nothing has to be told.
        rows = specs[0].rows if one.words else ()
        told = None if rows is None else rows * len(communicator.ranks)
        vote, transport = vote_of(communicator, one.words if told is None else 0), communicator.transport
        resumable = vote.resumable and transport.capabilities_for(planned.kind).resumable_moves
        return AtomicMove(vote, one, transport.prepare_move(one.move), resumable, told)

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
        """Run an allreduce of a schedule, and return the function that delivers its results.

        The results stay in transport memory until the bucket is known to be valid. ``use`` names the fusion buffer.
        """
        entries: Sequence[Entry | None] = launch.entries if launch.entries is not None else [None] * len(specs)
        _wait(entries)
        divisor = len(communicator.ranks)  # no schedule runs while a rank has joined
        deliver = self._reductions.packed(communicator, launch.planned.names, entries, specs, use, divisor)
        if not any(prod(spec.shape) for spec in specs):
            # A rank has a sum only after all ranks have entered, but an allreduce of nothing may return before. What has
            # returned may be delivered, so it must not turn out void on other ranks afterwards.
            finish(communicator.transport.barrier())
        return deliver


def _wait(entries: Sequence[Entry | None]) -> None:
    """Wait until the source of each entry may be read."""
    for entry in entries:
        source = entry.given.source if entry is not None else None
        if source is not None and source.wait is not None:
            source.wait()
