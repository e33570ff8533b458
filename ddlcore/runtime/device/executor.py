"""Runs buckets whose tensors are on devices.

A bucket runs on the device's queue if there is a transport for this device. Otherwise the bucket is staged on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.runtime.delivery import Deliver, Later, same, void
from ddlcore.runtime.device.devices import DeviceStream
from ddlcore.runtime.device.on_queue import Queued, queued
from ddlcore.runtime.device.routes import DeviceRoutes, OnDevice
from ddlcore.runtime.device.staging import HostRuns, Staging
from ddlcore.runtime.integers import is_exact
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import Entry
from ddlcore.runtime.scaling import reduction
from ddlcore.runtime.schedule import Launch, Run
from ddlcore.types import Kind

log = logging.getLogger("ddl")
Entries = Sequence[Entry | None]


class DeviceExecutor:
    """Runs buckets whose tensors are on devices. Only the engine's thread uses this object.

    ``compressor(name, kernels)`` returns a new compressor that uses a device's kernels. Handles are completed when the
    work is queued. The results are complete later, when the device has reached the events in the outcomes.
    """

    def __init__(self, routes: DeviceRoutes, compressor: Callable[[str, Kernels], Compressor], host: HostRuns) -> None:
        """Create the executor. ``host`` runs the buckets that are staged on the host."""
        self._routes = routes
        self._compressor = compressor
        self._staging = Staging(host)
        self._told: set[tuple[int, str]] = set()  # (process set, compressor) that were logged as staged on the host

    def execute(self, bucket: Bucket, entries: Entries, specs: Sequence[Spec]) -> list[Outcome | None]:
        """Run a negotiated bucket, and return one outcome for each entry.

        Such a bucket cannot be void, because every rank takes part with real data or has joined. An entry is None if
        this rank has joined.
        """
        route = self._routes.route(bucket.set_id, specs[0].device)
        if not self._on_queue(route, bucket.kind, specs[0]):
            return self._staging.execute(route, bucket, entries, specs)
        one = self._queued(route, bucket.kind, specs, bucket, again=False)
        one.pack(entries)
        return one.run(entries)

    def arranged(self, planned: Planned, specs: Sequence[Spec]) -> Run:
        """Return a function that runs the bucket ``planned`` of a schedule.

        The function is called each time the bucket is launched.
        """
        route = self._routes.route(planned.set_id, specs[0].device)
        if not self._on_queue(route, planned.kind, specs[0]):
            return self._staging.arranged(route, planned, specs)
        run: Callable[[OnDevice, Queued, Launch[Entry], str], Deliver | Later]
        run = self._confirmed if route.confirm is not None else self._apart
        if planned.kind.is_ragged:
            return partial(self._negotiated_slot, route, planned.kind, specs, run)
        return partial(run, route, self._queued(route, planned.kind, specs, None, again=True))

    def _negotiated_slot(
        self,
        route: OnDevice,
        kind: Kind,
        specs: Sequence[Spec],
        run: Callable[[OnDevice, Queued, Launch[Entry], str], Deliver | Later],
        launch: Launch[Entry],
        use: str,
    ) -> Deliver | Later:
        assert launch.bucket is not None
        return run(route, self._queued(route, kind, specs, launch.bucket, again=False), launch, use)

    def _confirmed(self, route: OnDevice, one: Queued, launch: Launch[Entry], use: str) -> Deliver:
        """Ask the hosts of all members whether they take part with real data, and run the bucket if all of them do.

        If a member has no real data, the devices exchange no data, and the bucket is void.
        """
        assert route.confirm is not None
        entries = launch.entries if use != "dummy" else None
        if entries is None:
            route.confirm.cast((), False)
            return void
        one.pack(entries)
        if not route.confirm.cast((), True):
            one.void(entries)
            one.forget()
            return void
        outcomes = one.run(entries)
        one.forget()
        return partial(same, outcomes)

    def _apart(self, route: OnDevice, one: Queued, launch: Launch[Entry], use: str) -> Later:
        """Queue a bucket on the device before it is known whether some ranks take part with dummy data.

        So the device writes only transport memory, and the user's tensors are written later. If the bucket is marked by
        ``commit`` and the hosts can exchange this message, they tell each other whether any rank used dummy data. For
        the other buckets, an event of the device shows when the bucket is done.
        """
        entries: Entries = launch.entries if launch.entries is not None else [None] * len(one.specs)
        if launch.entries is not None:
            one.pack(entries)
        later = one.run_apart(entries)
        one.forget()
        # Asking all hosts after every bucket would make each bucket wait for the slowest rank. Tensors depend on each
        # other only across segments, so the hosts ask after the last bucket of a segment (``commit``); a thread that
        # waits for an earlier bucket uses that bucket's event instead. The answer also covers the earlier buckets of
        # the process set, since every rank launches them in the same order. A rank with dummy data must ask as well,
        # because ``commit`` is itself a collective of all members.
        if launch.planned.commit and route.commit is not None and route.commit(use != "dummy"):
            return replace(later, told=True)
        return later

    def _on_queue(self, route: OnDevice, kind: Kind, spec: Spec) -> bool:
        """Return whether the transport for the device can run buckets with this ``kind`` and ``spec``.

        All ranks get the same answer.
        """
        if route.transport is None:
            return False
        if kind not in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            return True
        compressor = self._stream_compressor(route.stream, spec.compressor)
        if not compressor.summable:  # such a compressor runs on the host, where shards are decoded and added
            self._tell(route, spec.compressor)
            return False
        if is_exact(spec, len(route.host.ranks)) and compressor.wire_dtype(spec.dtype) is spec.dtype:
            return False  # the kernels of the host add integers exactly
        capabilities = route.transport.capabilities_for(kind)
        wire = compressor.wire_dtype(spec.dtype)
        return wire in capabilities.dtypes and reduction(spec, 1)[0] in capabilities.ops

    def _tell(self, route: OnDevice, name: str) -> None:
        told = (route.host.set_id, name)
        if route.host.rank == 0 and told not in self._told:
            self._told.add(told)
            what = f"tensors on {route.stream.device.kind} that travel as {name} are staged on the host"
            log.info("process set %d: %s, for what that makes of them cannot be added", route.host.set_id, what)

    def _queued(self, route: OnDevice, kind: Kind, specs: Sequence[Spec], bucket: Bucket | None, again: bool) -> Queued:
        compressor = self._stream_compressor(route.stream, specs[0].compressor)
        return queued(route, kind, specs, compressor, bucket, again)

    def _stream_compressor(self, stream: DeviceStream, name: str) -> Compressor:
        found = stream.compressors.get(name)
        if found is None:
            found = stream.compressors[name] = self._compressor(name, stream.kernels)
        return found
