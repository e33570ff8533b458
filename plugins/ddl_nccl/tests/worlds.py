"""Groups of NCCL transports over the stand-in, whose ranks are threads with a pretend device each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import ClassVar

from ddl_conform.group import TransportGroup
from ddl_conform.pretend import KIND, PretendQueue
from ddl_conform.pretend_world import PretendWorld, pretend_registry
from ddl_conform.world import World
from ddl_nccl.conformance import HostedTransport
from ddl_nccl.standin import StandIn
from ddl_nccl.transport import NcclTransport

from ddlcore.contracts.transport import Context
from ddlcore.hooks import TransportProvider
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.plug.registry import Distribution
from ddlcore.types import Member

__all__ = ["NcclWorld", "PretendNccl", "hosted", "open_group"]


def hosted(
    size: int,
    standin: StandIn,
    settings: Mapping[str, str | int | float | bool] | None = None,
    deadline_s: float = 20.0,
) -> TransportGroup:
    """Return a group of ranks on one host, not open yet."""
    members = [Member(2 * rank + 1, 0) for rank in range(size)]
    transports = [HostedTransport(standin) for _ in range(size)]
    return TransportGroup(transports, CpuKernels(), members=members, settings=settings or {}, deadline_s=deadline_s)


@contextmanager
def open_group(
    size: int, standin: StandIn, settings: Mapping[str, str | int | float | bool] | None = None
) -> Iterator[TransportGroup]:
    """Yield an open group, and close it in any case."""
    group = hosted(size, standin, settings)
    try:
        group.open()
        yield group
    finally:
        with suppress(Exception):
            group.discard()


class PretendNccl(NcclTransport):
    """The transport that a job opens for pretend devices; all ranks share the current stand-in."""

    capabilities = replace(NcclTransport.capabilities, devices=frozenset({KIND}))
    standin: ClassVar[StandIn] = StandIn()

    def __init__(self) -> None:
        super().__init__(self.standin)

    def open(self, context: Context) -> None:
        assert isinstance(context.queue, PretendQueue)
        self.standin.know(context.queue)
        super().open(context)


class NcclWorld(PretendWorld):
    """A job whose ranks have a pretend device each, and NCCL's transport between the devices."""

    def __init__(
        self,
        size: int,
        *,
        backend: str = "shm",
        settings: Mapping[str, object] | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        PretendNccl.standin = StandIn()
        registry = pretend_registry()
        provider = TransportProvider(
            name="over-the-stand-in",
            target=f"{__name__}:PretendNccl",
            devices=(KIND,),
            in_process=True,
            spans_devices=True,
            own_device=True,
        )
        registry.offer(provider, Distribution("ddl-nccl", "tests"))
        given = {"device_dense": provider.name, **(settings or {})}
        World.__init__(self, size, backend=backend, settings=given, hosts=hosts, registry=registry)

    def __enter__(self) -> NcclWorld:
        super().__enter__()
        return self
