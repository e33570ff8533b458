"""Measures the times of copies between the GPUs of a host, with peer access on and off, for ``ddl doctor``.

This module does not judge the times. The copies run in a separate process. If an IOMMU or a switch is misconfigured, a
copy may never end, and then only the end of its process can stop it. The separate process calls libcuda directly, so
that no framework's context is affected.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddlcore.contracts.check import Check, Finding, HostView, Seen

LIBRARY = "libcuda.so.1"
SMALL_BYTES, LARGE_BYTES = 16, 64 << 20
SMALL_TIMES, LARGE_TIMES = 100, 5
PATIENCE_S = 90.0  # for all pairs of a host
_PATTERN = 0x5A
_NON_BLOCKING = 1
_ALREADY_ON, _NOT_ON = 704, 705  # CUresults: peer access already is as requested

Tell = Callable[[Mapping[str, Any]], None]


class Cuda:
    """The few calls of CUDA's driver that the measurement needs. ``library`` is libcuda, or a replacement in tests."""

    def __init__(self, library: Any) -> None:
        """Open all devices and allocate memory on each device. Raises OSError if the driver fails."""
        self._library = library
        self._call("cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self._devices = [ctypes.c_int() for _ in range(count.value)]
        self._contexts = [ctypes.c_void_p() for _ in self._devices]
        for index, (device, context) in enumerate(zip(self._devices, self._contexts)):
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._memory = [self._allocated(context) for context in self._contexts]

    def buses(self) -> list[str]:
        """Return the PCI bus addresses of the devices, in CUDA's order of devices."""
        found = []
        for device in self._devices:
            text = ctypes.create_string_buffer(32)
            self._call("cuDeviceGetPCIBusId", text, ctypes.c_int(32), device)
            found.append(text.value.decode().lower())
        return found

    def set_peers(self, on: bool) -> None:
        """Switch peer access on or off for every pair of devices that supports it."""
        for a, here in enumerate(self._devices):
            for b, there in enumerate(self._devices):
                able = ctypes.c_int()
                if a != b:
                    self._call("cuDeviceCanAccessPeer", ctypes.byref(able), here, there)
                if able.value:
                    self._enter(a)
                    if on:
                        self._call("cuCtxEnablePeerAccess", self._contexts[b], ctypes.c_uint(0), fine=_ALREADY_ON)
                    else:
                        self._call("cuCtxDisablePeerAccess", self._contexts[b], fine=_NOT_ON)

    def copy_s(self, a: int, b: int, nbytes: int, times: int) -> float:
        """Return the time in seconds of one copy of ``nbytes`` bytes from GPU ``a`` to GPU ``b``.

        The time is the mean of ``times`` copies on a stream of ``a``.
        """
        self._enter(a)
        stream, begin, end = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        for event in (begin, end):
            self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        self._copy(a, b, nbytes, stream)  # the first copy also sets up what copies need
        self._call("cuEventRecord", begin, stream)
        for _ in range(times):
            self._copy(a, b, nbytes, stream)
        self._call("cuEventRecord", end, stream)
        self._call("cuEventSynchronize", end)
        took_ms = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(took_ms), begin, end)
        for event in (begin, end):
            self._call("cuEventDestroy_v2", event)
        self._call("cuStreamDestroy_v2", stream)
        return took_ms.value / 1e3 / times

    def is_right(self, a: int, b: int) -> bool:
        """Return whether bytes that are copied from GPU ``a`` to GPU ``b`` arrive unchanged."""
        for index, value in ((a, _PATTERN), (b, 0)):
            self._enter(index)
            self._call("cuMemsetD8_v2", self._memory[index], ctypes.c_ubyte(value), ctypes.c_size_t(LARGE_BYTES))
            self._call("cuCtxSynchronize")
        self._enter(a)
        self._copy(a, b, LARGE_BYTES, ctypes.c_void_p())
        self._call("cuCtxSynchronize")
        self._enter(b)
        arrived = ctypes.create_string_buffer(LARGE_BYTES)
        self._call("cuMemcpyDtoH_v2", arrived, self._memory[b], ctypes.c_size_t(LARGE_BYTES))
        return arrived.raw == bytes([_PATTERN]) * LARGE_BYTES

    def _allocated(self, context: ctypes.c_void_p) -> ctypes.c_ulonglong:
        address = ctypes.c_ulonglong()
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(2 * LARGE_BYTES))
        return address

    def _enter(self, index: int) -> None:
        self._call("cuCtxSetCurrent", self._contexts[index])

    def _copy(self, a: int, b: int, nbytes: int, stream: ctypes.c_void_p) -> None:
        # Within one GPU copy from one half to the other, because source and target must differ.
        target = ctypes.c_ulonglong(self._memory[b].value + (LARGE_BYTES if a == b else 0))
        pair = (target, self._contexts[b], self._memory[a], self._contexts[a])
        self._call("cuMemcpyPeerAsync", *pair, ctypes.c_size_t(nbytes), stream)

    def _call(self, function: str, *arguments: Any, fine: int = 0) -> None:
        code = getattr(self._library, function)(*arguments)
        if code not in (0, fine):
            raise OSError(f"{function} failed with CUDA's error {code}")


def measure(cuda: Cuda, tell: Tell) -> None:
    """Measure the copies between all pairs of GPUs, and pass the results as messages to ``tell``.

    The first message has the PCI bus addresses of the GPUs. Then there are two messages for each pair: one when the
    measurement of the pair begins, and one with its result. All pairs are measured without peer access first, then with
    it.
    """
    size = len(cuda.buses())
    tell({"buses": cuda.buses()})
    for state in ("off", "on"):  # "off" first, so that its results are known even if peer access hangs
        cuda.set_peers(state == "on")
        for a in range(size):
            for b in range(size):
                tell({"begin": [a, b], "state": state})
                small_s = cuda.copy_s(a, b, SMALL_BYTES, SMALL_TIMES)
                large_s = cuda.copy_s(a, b, LARGE_BYTES, LARGE_TIMES)
                right = a == b or cuda.is_right(a, b)
                rate = LARGE_BYTES / large_s / 1e9
                tell({"pair": [a, b], "state": state, "us": small_s * 1e6, "rate": rate, "right": right})


def put_together(
    messages: Iterable[Mapping[str, Any]], buses: Sequence[str], ended: bool, why: str = ""
) -> dict[str, Any]:
    """Return the facts of the measurement, made from its ``messages``.

    ``messages`` are those that ``measure`` sends. ``buses`` are the PCI bus addresses of the GPUs in the driver's
    order; the facts use this order. If the measurement stopped during the copies of a pair, there are two cases. If
    ``ended`` is false, these copies have not ended. If ``ended`` is true, the error ``why`` has ended the measurement.
    """
    size = len(buses)
    places: list[int] = []
    begun: tuple[str, list[int]] | None = None
    facts: dict[str, Any] = {key: {} for key in ("latency_us", "gbytes_per_s")}
    wrong: list[list[int]] = []
    for one in messages:
        if "buses" in one:
            places = [buses.index(bus) if bus in buses else -1 for bus in one["buses"]]
        elif "begin" in one:
            begun = (one["state"], [places[i] for i in one["begin"]])
        else:
            begun = None
            a, b = (places[i] for i in one["pair"])
            if a >= 0 and b >= 0:
                for key, value in (("latency_us", one["us"]), ("gbytes_per_s", one["rate"])):
                    empty = [[None] * size for _ in range(size)]
                    facts[key].setdefault(one["state"], empty)[a][b] = value
                if not one["right"]:
                    wrong.append([a, b])
    if begun is not None and not ended:
        facts["stuck"] = begun[1]
    elif begun is not None:
        facts["failed"] = [*begun[1], why]
    return {**facts, "wrong": wrong}


class LinksCheck(Check):
    """The check that adds the times of copies between a host's GPUs to the core's check of GPU links."""

    completes = "gpu-links"

    def look(self, host: HostView) -> Any:
        """Measure the copies, and return the facts for the core's check.

        Returns {} if the host has fewer than two GPUs, or if ``host`` shows only a recording of a host.
        """
        gpus = list(host.gpus.gpus()) if host.gpus is not None else []
        if host.root != "/" or len(gpus) < 2:
            return {}
        messages, ended, why = _from_child(host.environ, PATIENCE_S)
        return put_together(messages, [gpu.bus for gpu in gpus], ended, why)

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """Return no findings, because the core's check of GPU links judges the facts."""
        return ()


def _from_child(environ: Mapping[str, str], patience_s: float) -> tuple[list[dict[str, Any]], bool, str]:
    """Run the measurement in a child process, which may take ``patience_s`` seconds.

    Returns the child's messages, whether the child ended within that time, and the error with which the child failed
    (empty if it did not fail). Raises RuntimeError if the child failed before the first copy.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    child = subprocess.Popen(
        [sys.executable, "-c", "from ddl_nccl.links import main; main()"],
        env={**environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + patience_s
    try:
        out, err = child.communicate(timeout=patience_s)
        ended = True
    except subprocess.TimeoutExpired as error:
        child.kill()
        ended = False
        try:
            out, err = child.communicate(timeout=max(2.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:  # it hangs in the kernel: use what it had sent
            out, err = (error.stdout or b"").decode(), ""
    messages = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
    why = ""
    if ended and child.returncode != 0:
        why = err.strip().splitlines()[-1] if err.strip() else f"the copies ended with {child.returncode}"
        if not messages or "begin" not in messages[-1]:
            raise RuntimeError(why)
    return messages, ended, why


def main(library: Any = None, tell: Tell | None = None) -> None:
    """Run the measurement, and print a line of JSON for each message. The child process runs this function."""
    measure(
        Cuda(library or ctypes.CDLL(LIBRARY)),
        tell or (lambda message: print(json.dumps(message), flush=True)),
    )
