"""Worlds of threads on pretend devices: the registry they use, and the runtime and streams of a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ddlcore.api import Operations
from ddlcore.hooks import KernelsProvider, TransportProvider
from ddlcore.job import Job
from ddlcore.plug.registry import Distribution, Registry
from ddlcore.plug.settings import settings_of
from ddlcore.testing.pretend import KIND, PretendRuntime
from ddlcore.testing.pretend_tensors import PretendAdapter, stream
from ddlcore.testing.world import World
from ddlcore.types import Device

__all__ = ["PRETEND", "PretendWorld", "pretend_registry"]

PRETEND = Operations(PretendAdapter())
T = TypeVar("T")


def pretend_registry(kernels: bool = True) -> Registry:
    """Return a registry of everything installed, with the pretend transports.

    ``kernels``: also with pretend devices.
    """
    _, registry = settings_of(os.environ)
    ours = Distribution("ddlcore", "pretend")
    registry.offer(
        TransportProvider(
            name=KIND,
            target="ddlcore.testing.pretend_transport:PretendTransport",
            devices=(KIND,),
            in_process=True,
            sizes=(1, None),
        ),
        ours,
    )
    mute = "ddlcore.testing.pretend_transport:MuteTransport"
    registry.offer(TransportProvider("mute", mute, devices=("cpu",), in_process=True), ours)
    if kernels:
        registry.offer(KernelsProvider(name=KIND, target="ddlcore.testing.pretend:PretendRuntime", device=KIND), ours)
    return registry


class PretendWorld(World):
    """A world whose ranks each have a pretend device.

    ``route`` is the value of the setting ``device_dense``; by default the device's transport. ``backend`` is the
    transport of host memory, by which the ranks learn that all of them have launched a bucket. With "shm" they learn it
    for each bucket, by an atomic allreduce. With "threads" they learn it once for several buckets. With "mute" the host
    cannot tell it: only the end of the collective on the device does.
    """

    def __init__(
        self,
        size: int,
        *,
        backend: str = "shm",
        route: str = KIND,
        settings: Mapping[str, object] | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        given = {"device_dense": route, **(settings or {})}
        backend = backend if size > 1 else "auto"
        super().__init__(size, backend=backend, settings=given, hosts=hosts, registry=pretend_registry())

    def __enter__(self) -> PretendWorld:
        super().__enter__()
        return self

    def on_streams(self, function: Callable[[int, Job], T], *, deadline_s: float = 90.0, last: bool = False) -> list[T]:
        """Call ``function(rank, job)`` on every rank as ``run`` does, and return the results in the order of the ranks.

        During the call, the rank's current stream is a new stream of the rank's own device.
        """

        def play(rank: int, job: Job) -> T:
            runtime = PretendRuntime()
            runtime.open(Device(KIND, rank % PretendRuntime.count()))
            with stream(runtime):
                return function(rank, job)

        return self.run(play, deadline_s=deadline_s, last=last)
