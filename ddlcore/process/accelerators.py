"""Makes the objects that handle a rank's tensors on devices, and imports their modules, if the rank may need them.

That is when the rank begins, if a device can be used then. Otherwise it is when the first such tensor comes, because
devices may appear later: a plugin decides by the environment, such as CUDA_VISIBLE_DEVICES, which the script may change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.device import DeviceRuntime
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.solo import QueuedSolo
from ddlcore.contracts.transport import Transport
from ddlcore.plug.registry import Registry
from ddlcore.reentry import Lock
from ddlcore.runtime.backend import AUTO, SOLO, STAGED_ON_HOST
from ddlcore.runtime.executor import HostExecutor
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.routes import asked_for_devices
from ddlcore.types import CPU, Device

if TYPE_CHECKING:
    from ddlcore.runtime.device.devices import Devices
    from ddlcore.runtime.device.executor import DeviceExecutor
    from ddlcore.runtime.device.routes import DeviceRoutes


class _Made(NamedTuple):
    devices: Devices
    routes: DeviceRoutes
    executor: DeviceExecutor


class Accelerators:
    """What a rank's job does with tensors on devices.

    ``over`` returns whether the job is over. ``host`` runs those buckets of device tensors that are staged on the host.
    """

    def __init__(
        self,
        registry: Registry,
        settings: Mapping[str, object],
        sets: ProcessSets,
        compressor: Callable[[str, Kernels], Compressor],
        over: Callable[[], bool],
        meter: Meter,
        local_rank: int,
        launched_by: str,
        host: HostExecutor,
    ) -> None:
        self._registry = registry
        self._sets = sets
        self._compressor = compressor
        self._over = over
        self._meter = meter
        self._local_rank = local_rank
        self._launched_by = launched_by
        self._host = host
        self._backend = str(settings["backend"])
        self._dense = str(settings["device_dense"])
        self._stage_on_host = self._dense == STAGED_ON_HOST
        self._stage_sparse_on_host = self._stage_on_host or settings["device_sparse"] == STAGED_ON_HOST
        self._lock = Lock()
        self._made: _Made | None = None
        self._devices: Devices | None = None  # those of ``_made``
        if any(not registry.missing(provider) for provider in registry.kernels.values()):
            self._make()  # not later, in the middle of a training step

    def label(self, device: Device, sparse: bool = False, stage_on_host: bool = False) -> str:
        """Return the label of ``device`` for a Spec, and open the device if it is not open. Any thread may call this.

        Ranks that use several devices must make their first use of these devices in the same order. ``sparse`` says
        that the tensor is a sparse gradient. ``stage_on_host`` says that the user asked for staging on the host. Raises
        PluginError if no installed plugin supports this kind of device, and DeviceError if the device cannot be opened.
        """
        if device.kind == CPU.kind:
            return CPU.kind
        return (self._devices or self._make().devices).label(
            device, stage_on_host or (self._stage_sparse_on_host if sparse else self._stage_on_host)
        )

    def executor(self) -> DeviceExecutor:
        """Return the object that runs buckets of device tensors. Only the engine's thread may call this."""
        return (self._made or self._make()).executor

    @property
    def untidy(self) -> bool:
        """Return whether there is memory that ``tidy`` must release later."""
        devices = self._devices
        return devices is not None and devices.untidy

    def tidy(self) -> None:
        """Release memory that devices no longer use. Only the engine's thread may call this.

        Raises an error if work that was queued on a device was aborted, because its results would be garbage.
        """
        if (made := self._made) is not None:
            made.routes.check()
            made.devices.tidy()

    def _make(self) -> _Made:
        """Create the objects, if there are none. Any thread may call this.

        Of devices that have appeared later, it is the user's thread with its first tensor on one of them. If this rank
        has joined without such a tensor, it is the engine's thread with the first bucket of the others.
        """
        # Imported here: see the module's docstring. The lock is not held, because an import waits for other imports.
        from ddlcore.runtime.device.devices import Devices
        from ddlcore.runtime.device.executor import DeviceExecutor
        from ddlcore.runtime.device.routes import DeviceOpener, DeviceRoutes

        registry, sets, meter = self._registry, self._sets, self._meter

        def build(name: str) -> Transport:
            return QueuedSolo() if name == SOLO else registry.load(registry.transport(name))()

        self._lock.refuse("an operation")
        with self._lock:
            if self._made is None:
                devices = Devices(self._open, self._own, self._over, meter)
                providers = registry.transports.values
                opener = DeviceOpener(providers, registry.missing, build, self._wanted, self._launched_by)
                routes = DeviceRoutes(opener, sets, devices, meter)
                sets.use_for_devices(routes)
                made = _Made(devices, routes, DeviceExecutor(routes, self._compressor, self._host))
                # Last: if a signal handler raises an exception before this, the next call makes all of them again.
                self._made, self._devices = made, devices
            return self._made

    def _open(self, device: Device) -> DeviceRuntime:
        runtime = self._registry.load(self._registry.kernels_for(device.kind))()
        runtime.open(device)
        return runtime

    def _own(self, kind: str, number: int) -> Device:
        """Return a device of ``kind`` that this rank chooses by itself.

        For ``number`` 0, this is the device whose number is the local rank (device 0 if there is no such device). A
        higher ``number`` is added to the device's number. Counting continues with device 0 after the last device.
        """
        count = self._registry.load(self._registry.kernels_for(kind)).count()
        first = self._local_rank if count > self._local_rank else 0
        return Device(kind, (first + number) % max(count, 1))

    def _wanted(self, kind: str) -> str:
        return self._dense if self._dense != AUTO else asked_for_devices(self._backend, kind, self._registry)
