"""Puts together the parts of a rank that serve tensors on devices, from the installed kernels and transports."""

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
    """An object that looks up the installed kernels and transports. The registry of ``plug`` implements it."""

    def kernels_for(self, kind: str) -> KernelsProvider:
        """Return the plugin that provides kernels for devices of ``kind``.

        Raises PluginError if no plugin can; the message says for each installed one why not.
        """

    def load(self, provider: Any) -> Any:
        """Return the class that ``provider`` names."""


class Accelerators:
    """Everything in a rank's job that serves tensors on devices.

    These are the devices, their routes, and the executor of their buckets. ``solo`` makes the transport of a process
    set that has only this rank. ``over`` returns whether the job is over. ``host`` runs those buckets of device tensors
    that are reduced in host memory.
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
        """Return the name of ``device`` in a Spec, and open the device if it is not open. Any thread may call this.

        Ranks that use several devices must use them first in the same order. ``sparse``: the tensor is a sparse
        gradient. ``stage_on_host``: the user asked for staging on the host. Raises PluginError if no installed plugin
        serves that kind of device, and DeviceError if the device cannot be opened.
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
        """Return the device of ``kind`` that this rank would choose by itself; ``number`` is added to its number.

        After the last device of the host, the count begins again with the first.
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
