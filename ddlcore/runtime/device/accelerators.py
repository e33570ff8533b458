"""Creates those objects of a rank that handle tensors on devices, from the installed kernels and transports."""

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
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.routes import Offers, asked_for_devices
from ddlcore.types import CPU, Device


class DeviceOffers(Offers, Protocol):
    """An object that finds the installed kernels and transports. The registry of ``plug`` implements this protocol."""

    def kernels_for(self, kind: str) -> KernelsProvider:
        """Return the plugin that provides kernels for devices of ``kind``.

        Raises PluginError if no plugin can provide them. The message says for each installed plugin why it cannot.
        """

    def load(self, provider: Any) -> Any:
        """Return the class that ``provider`` names."""


class Accelerators:
    """The objects of a rank's job that handle tensors on devices: the devices, their routes, and the bucket executor.

    ``solo`` creates the transport for a process set that contains only this rank. ``over`` returns whether the job is
    over. ``host`` runs those buckets of device tensors that are staged on the host.
    """

    def __init__(
        self,
        shelf: DeviceOffers,
        settings: Mapping[str, object],
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
        sets.beside = self._routes = DeviceRoutes(sets.opener, device_opener, sets, self.devices, meter)
        self.executor = DeviceExecutor(self._routes, compressor, host)

    def label(self, device: Device, sparse: bool = False, stage_on_host: bool = False) -> str:
        """Return the label of ``device`` for a Spec, and open the device if it is not open. Any thread may call this.

        Ranks that use several devices must make their first use of these devices in the same order. ``sparse`` says
        that the tensor is a sparse gradient. ``stage_on_host`` says that the user asked for staging on the host. Raises
        PluginError if no installed plugin supports this kind of device, and DeviceError if the device cannot be opened.
        """
        if device.kind == CPU.kind:
            return CPU.kind
        return self.devices.label(
            device, stage_on_host or (self._stage_sparse_on_host if sparse else self._stage_on_host)
        )

    @property
    def untidy(self) -> bool:
        """Return whether there is memory that ``tidy`` must release later."""
        return self.devices.untidy

    def tidy(self) -> None:
        """Release memory that devices no longer use. Only the engine's thread may call this.

        Raises an error if work that was queued on a device was aborted, because its results would be garbage.
        """
        self._routes.check()
        self.devices.tidy()

    def _open(self, device: Device) -> DeviceRuntime:
        runtime: DeviceRuntime = self._shelf.load(self._shelf.kernels_for(device.kind))()
        runtime.open(device)
        return runtime

    def _own(self, kind: str, number: int) -> Device:
        """Return a device of ``kind`` that this rank chooses by itself.

        For ``number`` 0, this is the device whose number is the local rank (device 0 if there is no such device). A
        higher ``number`` is added to the device's number. Counting continues with device 0 after the last device.
        """
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
