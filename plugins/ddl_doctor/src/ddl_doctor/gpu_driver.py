"""Reads from NVIDIA's driver what examining and watching a host needs: its GPUs, their links and their load."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddlcore.builtin.nvml import LIBRARY, TEXT_BYTES, Nvml, shown
from ddlcore.contracts.check import Gpu, Links

_P2P_READ, _P2P_WRITE, _P2P_OK = 0, 1, 0


class _Pci(ctypes.Structure):  # nvmlPciInfo_t
    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):  # nvmlMemory_t
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):  # nvmlUtilization_t
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True)
class Use:
    """The load of one GPU, caused by all programs on this GPU together."""

    share: float  # fraction of recent time in which a program ran on the GPU, 0 … 1
    used_bytes: int
    total_bytes: int


class GpuDriver(Nvml):
    """The same access as Nvml, and more questions.

    If a call of the library fails, the further methods leave the missing value out, or return 0 or "" in its place.
    """

    def gpus(self) -> Sequence[Gpu]:
        """Return the GPUs of this host in the driver's order; an empty list if a call of the library fails."""
        return [self._gpu(index, handle) for index, handle in enumerate(self._handles())]

    def peers(self) -> Sequence[Sequence[bool]]:
        """Return a table of booleans about direct access between GPUs.

        Row a, column b says whether GPU a can read and write the memory of GPU b directly. The value for a GPU and
        itself is False.
        """
        handles = self._handles()
        return [[a is not b and self._reaches(a, b) for b in handles] for a in handles]

    def links(self) -> Links | None:
        """Return None, because the driver's library cannot measure copies."""
        return None

    def use(self, index: int) -> Use | None:
        """Return the load of the GPU with the number ``index``; None if the driver does not report the load."""
        handle = ctypes.c_void_p()
        memory, utilization = _Memory(), _Utilization()
        if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
            return None
        if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization)) != 0:
            return None
        return Use(utilization.gpu / 100, int(memory.used), int(memory.total))

    def _handles(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        handles = [ctypes.c_void_p() for _ in range(count.value)]
        for index, handle in enumerate(handles):
            if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
                return []  # if one GPU were left out, the indexes of the following GPUs would be wrong
        return handles

    def _gpu(self, index: int, handle: ctypes.c_void_p) -> Gpu:
        pci, memory = _Pci(), _Memory()
        self._library.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci))
        self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        name, uuid = self._text("nvmlDeviceGetName", handle), self._text("nvmlDeviceGetUUID", handle)
        domain, _, rest = pci.busId.decode().lower().partition(":")
        return Gpu(index, name, uuid, f"{domain[-4:]}:{rest}" if rest else "", int(memory.total))

    def _text(self, function: str, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        getattr(self._library, function)(handle, text, ctypes.c_uint(TEXT_BYTES))
        return text.value.decode(errors="replace")

    def _reaches(self, a: ctypes.c_void_p, b: ctypes.c_void_p) -> bool:
        status = ctypes.c_uint()
        for way in (_P2P_READ, _P2P_WRITE):
            if self._library.nvmlDeviceGetP2PStatus(a, b, ctypes.c_uint(way), ctypes.byref(status)) != 0:
                return False
            if status.value != _P2P_OK:
                return False
        return True


def use_of(environ: Mapping[str, str], local_rank: int) -> Callable[[], tuple[float, int, int] | None]:
    """Return a function that measures the load of the GPU that a rank uses.

    Each call of the returned function gives three numbers: the fraction of the recent time, from 0 to 1, in which the
    GPU was in use, the used bytes, and the total bytes of its memory. The call returns None instead if the rank uses no
    GPU or if the driver does not report the load. ``environ`` is the rank's environment. If the rank sees N GPUs, the
    rank uses the GPU at the position ``local_rank`` modulo N among them.
    """
    driver = open_driver()
    mine = visible(driver.gpus(), environ.get("CUDA_VISIBLE_DEVICES")) if driver is not None else []
    if driver is None or not mine:
        return lambda: None
    index, known = mine[local_rank % len(mine)].index, driver

    def use() -> tuple[float, int, int] | None:
        one = known.use(index)
        return None if one is None else (one.share, one.used_bytes, one.total_bytes)

    return use


def open_driver() -> GpuDriver | None:
    """Load the driver's management library, and return access to it.

    Return None if the library is missing, too old, or does not answer.
    """
    try:
        return GpuDriver(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError):
        return None


def visible(gpus: Sequence[Gpu], wanted: str | None) -> list[Gpu]:
    """Return the GPUs that a process sees, in the order in which CUDA numbers them in that process.

    ``gpus`` are all GPUs of the host in the driver's order. ``wanted`` is the process's value of CUDA_VISIBLE_DEVICES;
    None if the variable is not set. MIG instances are left out of the result.
    """
    found = shown(wanted, [gpu.uuid for gpu in gpus])
    return [gpus[one] for one in found if isinstance(one, int)]
