"""Brings together what a rank needs for tensors on devices: which of the installed kernels and transports it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.device import DeviceRuntime
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Transport
from ddlcore.hooks import KernelsProvider
from ddlcore.runtime.backend import AUTO
from ddlcore.runtime.device.devices import Devices
from ddlcore.runtime.device.executor import DeviceExecutor
from ddlcore.runtime.device.routes import SOLO, STAGED_ON_HOST, DeviceOpener, DeviceRoutes
from ddlcore.runtime.device.staging import HostRuns
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.process_sets import Opener, ProcessSets
from ddlcore.runtime.routes import Offers, asked_for_devices
from ddlcore.types import CPU, Device


class Shelf(Offers, Protocol):
    """The installed kernels and transports; plug's registry is one."""

    def kernels_for(self, kind: str) -> KernelsProvider:
        """Return what serves a kind of device. Raises PluginError, which says why each offer cannot."""

    def load(self, provider: Any) -> Any:
        """Return the class that a provider names."""


class Accelerators:
    """The devices of one rank's job.

    ``solo`` makes the transport of a set of one rank; ``over`` returns whether the job is over; ``host`` runs what is
    staged on the host.
    """

    def __init__(
        self,
        shelf: Shelf,
        settings: Mapping[str, object],
        opener: Opener,
        sets: ProcessSets,
        solo: Callable[[], Transport],
        compressor: Callable[[str, Kernels], Compressor],
        over: Callable[[], bool],
        meter: Meter,
        local_rank: int,
        launched_by: str,
        host: HostRuns,
    ) -> None:
        self._shelf = shelf
        self._solo = solo
        self._local_rank = local_rank
        self._backend = str(settings["backend"])
        self._dense = str(settings["device_dense"])
        self._stage_on_host = self._dense == STAGED_ON_HOST
        self._stage_sparse_on_host = self._stage_on_host or settings["device_sparse"] == STAGED_ON_HOST
        self.devices = Devices(self._open, self._own, over, meter)
        device_opener = DeviceOpener(shelf.transports.values, shelf.missing, self._build, self._wanted, launched_by)
        sets.beside = self._routes = DeviceRoutes(opener, device_opener, sets, self.devices, meter)
        self.executor = DeviceExecutor(self._routes, compressor, host)

    def label(self, device: Device, sparse: bool = False, stage_on_host: bool = False) -> str:
        """Return the name of ``device`` in a Spec, and open the device the first time. Any thread may call this.

        Ranks that use several devices must name them in the same order. ``sparse``: for a sparse gradient.
        ``stage_on_host``: the user asked for staging on the host. Raises PluginError if nothing serves that kind of
        device, and DeviceError if it cannot be opened.
        """
        if device.kind == CPU.kind:
            return CPU.kind
        return self.devices.label(
            device, stage_on_host or (self._stage_sparse_on_host if sparse else self._stage_on_host)
        )

    @property
    def untidy(self) -> bool:
        """Return whether memory is kept that ``tidy`` must release."""
        return self.devices.untidy

    def tidy(self) -> None:
        """Release memory that devices no longer use. Engine's thread only.

        Raises if a transport has failed by itself since the last call.
        """
        self._routes.check()
        self.devices.tidy()

    def _open(self, device: Device) -> DeviceRuntime:
        runtime: DeviceRuntime = self._shelf.load(self._shelf.kernels_for(device.kind))()
        runtime.open(device)
        return runtime

    def _own(self, kind: str, number: int) -> Device:
        """Return the device of a kind that this rank would choose by itself; ``number``: how many devices after it."""
        count = self._shelf.load(self._shelf.kernels_for(kind)).count()
        first = self._local_rank if count > self._local_rank else 0
        return Device(kind, (first + number) % max(count, 1))

    def _wanted(self, kind: str) -> str:
        return self._dense if self._dense != AUTO else asked_for_devices(self._backend, kind, self._shelf)

    def _build(self, name: str) -> Transport:
        if name == SOLO:
            return self._solo()
        transport: Transport = self._shelf.load(self._shelf.transport(name))()
        return transport
