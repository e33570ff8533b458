"""Reads facts about NVIDIA's GPUs from NVML, the driver's own management library. No Python package is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
TEXT_BYTES = 96  # size of a text buffer; no name, version or UUID is longer
_ENABLED = 1


class DriverError(OSError):
    """Raised if a function of the driver's library returned an error code. The library itself was loaded.

    The message contains the library's own text for the error.
    """


class Nvml:
    """Access to NVML, the management library of NVIDIA's driver.

    ``library`` is the loaded library, or a substitute for tests.
    """

    def __init__(self, library: Any) -> None:
        """Initialise the library. Raises DriverError if the driver does not answer."""
        self._library = library
        self._ask("nvmlInit_v2")

    def close(self) -> None:
        """Release the library. After this call, no other method may be called."""
        self._library.nvmlShutdown()

    def driver(self) -> str:
        """Return the driver's version. Raises DriverError if the library does not return the version."""
        return self._told("nvmlSystemGetDriverVersion")

    def inventory(self) -> list[tuple[str, str, list[str]]]:
        """Return (name, UUID, UUIDs of the MIG instances) for each GPU, in the driver's order.

        Raises DriverError if a call of the library fails.
        """
        count = ctypes.c_uint()
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            name, uuid = self._told("nvmlDeviceGetName", handle), self._told("nvmlDeviceGetUUID", handle)
            found.append((name, uuid, self._parts(handle)))
        return found

    def _parts(self, handle: ctypes.c_void_p) -> list[str]:
        """Return the UUIDs of a GPU's MIG instances. The list is empty if the GPU is not divided into instances.

        ``handle`` is the library's handle of the GPU.
        """
        library = self._library
        now, later, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        if library.nvmlDeviceGetMigMode(handle, ctypes.byref(now), ctypes.byref(later)) or now.value != _ENABLED:
            return []
        self._ask("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(most))
        found = []
        for place in range(most.value):
            part = ctypes.c_void_p()
            if not library.nvmlDeviceGetMigDeviceHandleByIndex(handle, ctypes.c_uint(place), ctypes.byref(part)):
                found.append(self._told("nvmlDeviceGetUUID", part))
        return found

    def _ask(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            describe = self._library.nvmlErrorString
            describe.restype = ctypes.c_char_p
            raise DriverError(f"{name}: {(describe(code) or b'').decode() or code}")

    def _told(self, name: str, *arguments: Any) -> str:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._ask(name, *arguments, text, ctypes.c_uint(TEXT_BYTES))
        return text.value.decode(errors="replace")


def load_nvml() -> Nvml:
    """Load the driver's management library, and return access to it.

    Raises OSError if the library is missing, DriverError if the driver does not answer, and AttributeError if the library
    is so old that it lacks a function.
    """
    return Nvml(ctypes.CDLL(LIBRARY))


def shown(
    wanted: str | None, uuids: Sequence[str], parts: Sequence[str] = (), divided: Collection[int] = ()
) -> Sequence[int | str]:
    """Return the devices that CUDA shows to a process: indexes of GPUs in order, or the UUID of one MIG instance.

    ``wanted`` is the process's value of CUDA_VISIBLE_DEVICES; None if the variable is not set. The value is a list of
    indexes or UUIDs, separated by commas. A UUID is GPU-…, which may be abbreviated, or MIG-…. If an entry is invalid,
    this entry and all entries after it are ignored. If a GPU is named twice, the process sees no GPU.

    ``uuids`` are the UUIDs of all GPUs of the host, ``parts`` are the UUIDs of all MIG instances, and ``divided`` are
    the indexes of the GPUs that are divided into instances. A process sees at most one instance. If ``wanted`` names a
    divided GPU, the result is the index of this GPU alone, and stands for one of its instances.
    """
    if wanted is None:
        return list(parts[:1]) or list(range(len(uuids)))
    chosen: list[int] = []
    for entry in map(str.strip, wanted.split(",")):
        if entry.startswith("MIG-"):
            known = not parts or entry in parts or "/" in entry  # the form of old drivers: MIG-GPU-<uuid>/<gi>/<ci>
            return [entry] if known and not chosen else chosen
        index = _index(entry, uuids)
        if index is None:
            break
        if index in chosen:
            return []
        chosen.append(index)
    return [index for index in chosen if index in divided][:1] or chosen


def _index(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isascii() and entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    alike = [i for i, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
    return alike[0] if len(alike) == 1 else None
