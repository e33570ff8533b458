"""Worlds for tests whose ranks are threads, and whose tensors are in the memory of pretend devices (see pretend.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ddl_conform.pretend import KIND, PretendRuntime
from ddl_conform.pretend_tensors import PretendAdapter, stream
from ddl_conform.world import World
from ddlcore.api import Operations
from ddlcore.hooks import KernelsProvider, TransportProvider
from ddlcore.plug.registry import Distribution, Registry
from ddlcore.plug.settings import settings_of
from ddlcore.process.job import Job
from ddlcore.types import Device

__all__ = ["PRETEND", "PretendWorld", "pretend_registry"]

PRETEND = Operations(PretendAdapter())
T = TypeVar("T")


def pretend_registry(kernels: bool = True) -> Registry:
    """Return a registry of all installed plugins, to which the transports for pretend devices are added.

    If ``kernels`` is true, the runtime of pretend devices is added too.
    """
    _, registry = settings_of(os.environ)
    ours = Distribution("ddlcore", "pretend")
    registry.offer(
        TransportProvider(
            name=KIND,
            target="ddl_conform.pretend_transport:PretendTransport",
            devices=(KIND,),
            in_process=True,
            sizes=(1, None),
        ),
        ours,
    )
    mute = "ddl_conform.pretend_transport:MuteTransport"
    registry.offer(TransportProvider("mute", mute, devices=("cpu",), in_process=True), ours)
    if kernels:
        registry.offer(KernelsProvider(name=KIND, target="ddl_conform.pretend:PretendRuntime", device=KIND), ours)
    return registry


class PretendWorld(World):
    """A world in which each rank has a pretend device.

    ``route`` is the value of the setting ``device_dense``. Its default is the transport for pretend devices.
    ``backend`` is the transport for host memory. It decides how the ranks find out whether all ranks have launched a
    bucket. With "shm", they find it out for each bucket, by an atomic allreduce. With "threads", they find it out once
    for several buckets. With "mute", they cannot find it out in host memory: a rank knows it only when the collective
    on the device has ended.
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
        """Call ``function(rank, job)`` on every rank, and return the results in the order of the ranks.

        Unlike in ``run``, the rank's current stream during the call is a new stream of the rank's own device.
        """

        def play(rank: int, job: Job) -> T:
            runtime = PretendRuntime()
            runtime.open(Device(KIND, rank % PretendRuntime.count()))
            with stream(runtime):
                return function(rank, job)

        return self.run(play, deadline_s=deadline_s, last=last)
