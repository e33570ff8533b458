"""Runs buckets of tensors that lie on devices: on their queue where a transport serves it, else staged on the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.messages import Bucket, Planned, Spec
from ddlcore.runtime.device_routes import DeviceRoutes, OnDevice
from ddlcore.runtime.devices import DeviceStream
from ddlcore.runtime.executor import Deliver, Later, Run, same, void
from ddlcore.runtime.integers import is_exact
from ddlcore.runtime.on_queue import Queued, queued
from ddlcore.runtime.request import Entry, Outcome
from ddlcore.runtime.scaling import reduction
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.staging import HostRuns, Staging
from ddlcore.types import Kind

__all__ = ["DeviceExecutor"]

log = logging.getLogger("ddl")
Entries = Sequence[Entry | None]


class DeviceExecutor:
    """Belongs to the engine thread. ``compressor(name, kernels)`` makes a compressor over a device's kernels.

    What is returned is complete when the device has come to the events of the outcomes: no handle waits for that.
    """

    def __init__(self, routes: DeviceRoutes, compressor: Callable[[str, Kernels], Compressor]) -> None:
        self._routes = routes
        self._compressor = compressor
        self._told: set[tuple[int, str]] = set()  # process set, compressor: that it is staged on the host

    def serve(self, host: HostRuns) -> None:
        """``host`` runs what is staged on the host."""
        self._staging = Staging(host)

    def execute(self, bucket: Bucket, entries: Entries, specs: Sequence[Spec]) -> list[Outcome | None]:
        """A bucket that was negotiated: every rank brings real data, or has joined, so that it cannot be void."""
        route = self._routes.route(bucket.set_id, specs[0].device)
        if not self._on_queue(route, bucket.kind, specs[0]):
            return self._staging.execute(route, bucket, entries, specs)
        one = self._queued(route, bucket.kind, specs, bucket, again=False)
        one.pack(entries)
        return one.run(entries)

    def arranged(self, planned: Planned, specs: Sequence[Spec]) -> Run:
        """How a bucket of a schedule is run."""
        route = self._routes.route(planned.set_id, specs[0].device)
        if not self._on_queue(route, planned.kind, specs[0]):
            return self._staging.arranged(route, planned, specs)
        run: Callable[[OnDevice, Queued, Launch[Entry], str], Deliver | Later]
        run = self._confirmed if route.confirm is not None else self._apart
        if planned.kind.is_ragged:
            return partial(self._ragged_slot, route, planned.kind, specs, run)
        return partial(run, route, self._queued(route, planned.kind, specs, None, again=True))

    def _ragged_slot(
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
        """All ranks tell each other's hosts that they bring real data, before the device is told to exchange it."""
        assert route.confirm is not None
        entries = launch.entries if use != "dummy" else None
        if entries is None:
            route.confirm(False)
            return void
        one.pack(entries)
        if not route.confirm(True):
            one.void(entries)
            one.forget()
            return void
        outcomes = one.run(entries)
        one.forget()
        return partial(same, outcomes)

    def _apart(self, route: OnDevice, one: Queued, launch: Launch[Entry], use: str) -> Later:
        """The device exchanges what may be dummy data, into transport memory.

        That none of it was dummy the hosts tell each other behind the last bucket that somebody may wait for; before
        that, and where they cannot, the device's event does.
        """
        entries: Entries = launch.entries if launch.entries is not None else [None] * len(one.specs)
        if launch.entries is not None:
            one.pack(entries)
        later = one.run_apart(entries)
        one.forget()
        if launch.planned.commit and route.commit is not None and route.commit(use != "dummy"):
            return replace(later, told=True)
        return later

    def _on_queue(self, route: OnDevice, kind: Kind, spec: Spec) -> bool:
        """Whether the device's own transport serves it; its capabilities are the same on all ranks."""
        if route.transport is None:
            return False
        if kind not in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            return True
        compressor = self._stream_compressor(route.stream, spec.compressor)
        if not compressor.summable:  # shards are decoded and added on the host, where such a compressor runs
            self._tell(route, spec.compressor)
            return False
        if is_exact(spec, len(route.host.ranks)) and compressor.wire_dtype(spec.dtype) is spec.dtype:
            return False  # integers are added exactly by the kernels of the host
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
