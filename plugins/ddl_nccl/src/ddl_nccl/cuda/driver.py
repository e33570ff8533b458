"""The calls of CUDA's driver that ddl makes, in one class over cuda-bindings. Tests replace this class.

Handles and addresses are numbers. Every call leaves the calling thread's current context as it was, because that
context belongs to the user's framework.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddlcore.contracts import pip_install
from ddlcore.errors import DeviceError

OWN = "ddl-"  # prefix of the names of ddl's own threads
_NOTHING: Any = contextlib.nullcontext()

# CUresult -> what to do about it.
FIXES = {
    2: "free memory on the device, or make buckets smaller: DDL_FUSION_BYTES",
    3: "set CUDA_VISIBLE_DEVICES before the first use of CUDA, and start processes by spawn, not by fork",
    46: "another process has the device for itself, or it is in exclusive mode; see nvidia-smi",
    100: "start the container with --gpus all; see CUDA_VISIBLE_DEVICES and nvidia-smi",
    101: "CUDA numbers the devices that CUDA_VISIBLE_DEVICES lets it see, from 0 on",
    200: "remove what DDL_CACHE_DIR (else ~/.cache/ddl) holds, so that kernels are compiled anew",
    209: "remove what DDL_CACHE_DIR (else ~/.cache/ddl) holds, so that kernels are compiled anew",
    222: "the driver is older than the compiler: update the driver, or install ddl-nccl[cu12]",
    700: "a kernel of this process used memory that is not its own; CUDA_LAUNCH_BLOCKING=1 shows which",
    719: "a kernel of this process failed; CUDA_LAUNCH_BLOCKING=1 shows which",
    802: "the machine is not ready yet: start nvidia-fabricmanager, and see nvidia-smi",
    803: "the driver's library and its kernel module are of different versions: reboot, or load the module anew",
    804: "remove the compatibility package of CUDA (cuda-compat) from the library path",
}


def failure(what: str, code: int, name: str = "", detail: str = "") -> DeviceError:
    """Return the error for the CUresult ``code``: what failed, what CUDA says about the code, and what to do.

    ``what`` names the action that failed. ``name`` and ``detail`` are CUDA's name and text for the code. No other
    function of this module translates a CUresult.
    """
    known = f"{name}: {detail}" if name and detail else name or f"error {code}"
    fix = FIXES.get(code)
    return DeviceError(f"CUDA: {what} failed with {known}" + (f"; {fix}" if fix else ""))


@dataclass(frozen=True)
class Facts:
    """The properties of one CUDA device."""

    name: str
    identity: str
    capability: tuple[int, int]
    multiprocessors: int
    driver: tuple[int, int]  # the newest CUDA version that the driver supports


class _Pushed:
    """A context manager that makes the CUDA context ``context`` current.

    This is a class, because a generator takes twice the time.
    """

    __slots__ = ("_context", "_cu")

    def __init__(self, cu: Any, context: int) -> None:
        self._cu, self._context = cu, context

    def __enter__(self) -> None:
        (code,) = self._cu.cuCtxPushCurrent(self._context)
        if code:
            raise failure("entering the device's context", int(code), code.name)

    def __exit__(self, *_: object) -> None:
        self._cu.cuCtxPopCurrent()


class Driver:
    """One CUDA device, used through the driver API. Any thread may use it.

    Call ``open`` first; only ``count`` may be called before ``open``.
    """

    def __init__(self) -> None:
        self._cu: Any = None
        self._context = 0
        self._pools = False
        self._asked = threading.local()  # whether the thread has queried an event before

    # --- the device

    def count(self) -> int:
        """Return the number of devices that CUDA sees. Raises DeviceError if there is no driver."""
        self._load()
        return int(self._ask("cuDeviceGetCount", "counting devices"))

    def open(self, index: int) -> Facts:
        """Retain the primary context of the device with number ``index``, and return the device's properties.

        All frameworks use the primary context.
        """
        seen = self.count()
        if index >= seen:
            raise DeviceError(f"CUDA: there is no cuda:{index}, this process sees {seen} device(s); {FIXES[101]}")
        cu = self._cu
        device = self._ask("cuDeviceGet", f"finding cuda:{index}", index)
        attribute = cu.CUdevice_attribute
        major, minor, multiprocessors, pools = (
            int(self._ask("cuDeviceGetAttribute", f"asking about cuda:{index}", kind, device))
            for kind in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                attribute.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
            )
        )
        self._pools = bool(pools)
        self._context = int(self._ask("cuDevicePrimaryCtxRetain", f"opening cuda:{index}", device))
        version = int(self._ask("cuDriverGetVersion", "asking for the driver's version"))
        name = bytes(self._ask("cuDeviceGetName", f"asking about cuda:{index}", 128, device)).split(b"\0")[0].decode()
        # Version 2 of the call gives a part of a device (MIG) its own UUID; the bindings for CUDA 13 have only that
        # one.
        call = "cuDeviceGetUuid_v2" if hasattr(cu, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        uuid = bytes(self._ask(call, f"asking about cuda:{index}", device).bytes).hex()
        return Facts(name, uuid, (major, minor), multiprocessors, (version // 1000, version % 1000 // 10))

    def memory(self) -> tuple[int, int]:
        """Return the number of free bytes and the total number of bytes of the device."""
        with self.current():
            free, total = self._ask("cuMemGetInfo", "asking for free memory")
        return int(free), int(total)

    def current(self) -> Any:
        """Return a context manager inside which the device's CUDA context is current for the calling thread.

        Entering this context manager once around several calls is cheaper than letting each call enter it.
        """
        code, context = self._cu.cuCtxGetCurrent()
        if not code and int(context) == self._context:
            return _NOTHING
        return _Pushed(self._cu, self._context)

    # --- streams and events

    def create_stream(self) -> int:
        """Create a stream that does not synchronize with the default stream, and return its handle."""
        with self.current():
            flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value
            return int(self._ask("cuStreamCreate", "making a stream", flags))

    def destroy_stream(self, stream: int) -> None:
        """Destroy the stream. Work that is queued on the stream still runs."""
        with self.current():
            self._ask("cuStreamDestroy", "closing a stream", stream)

    def create_event(self) -> int:
        """Create an event without timing, and return its handle. Events with timing cost more."""
        with self.current():
            flags = self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
            return int(self._ask("cuEventCreate", "making an event", flags))

    def destroy_event(self, event: int) -> None:
        """Destroy the event. Streams that already wait for the event still wait for it."""
        with self.current():
            self._ask("cuEventDestroy", "letting go of an event", event)

    def record(self, event: int, stream: int) -> None:
        """Record the event on the stream. The event is done when all work queued earlier on this stream has run."""
        with self.current():
            self._ask("cuEventRecord", "recording an event", event, stream)

    def record_all(self, event: int, stream: int) -> None:
        """Record the event so that it is done when all work queued so far, on any stream of the process, has run.

        Before CUDA 12.5 this call itself waits until all that work has run. ``stream`` may be any idle stream.
        """
        call = getattr(self._cu, "cuCtxRecordEvent", None)
        with self.current():
            if call is not None and self._version >= (12, 5):
                (code,) = call(self._context, event)
                if not code:
                    return
            self._ask("cuCtxSynchronize", "waiting for the device")
            self._ask("cuEventRecord", "recording an event", event, stream)

    def synchronise(self) -> None:
        """Wait until all work queued so far, on any stream of the process, has run."""
        with self.current():
            self._ask("cuCtxSynchronize", "waiting for the device")

    def wait_for(self, stream: int, event: int) -> None:
        """Make all work that is queued on the stream from now on wait for the event, as the event was last recorded."""
        with self.current():
            self._ask("cuStreamWaitEvent", "waiting for an event", stream, event, 0)

    def done(self, event: int) -> bool:
        """Return whether all work queued before the last recording of the event has run."""
        with self.current():
            if not hasattr(self._asked, "before"):
                self._spare_captures()
            (code,) = self._cu.cuEventQuery(event)
        if not code:
            return True
        if code == self._cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        raise self._failure("the work before an event", code)

    def _spare_captures(self) -> None:
        """Prevent this thread's event queries from ending a capture of a CUDA graph on another thread.

        CUDA ends such a capture unless the querying thread has set its capture mode to thread-local. This method sets
        the mode of ddl's own threads, and does not change the mode of a user's thread.
        """
        self._asked.before = True
        exchange = getattr(self._cu, "cuThreadExchangeStreamCaptureMode", None)
        if exchange is not None and threading.current_thread().name.startswith(OWN):
            exchange(self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    # --- memory

    def allocate(self, nbytes: int, stream: int) -> int:
        """Allocate device memory and return its address.

        All work that is queued on the stream after this call may use the memory.
        """
        with self.current():
            if self._pools:
                code, address = self._cu.cuMemAllocAsync(nbytes, stream)
            else:
                code, address = self._cu.cuMemAlloc(nbytes)
            if code:
                raise self._shortage(code, f"allocating {nbytes} bytes")
        return int(address)

    def free(self, address: int, stream: int) -> None:
        """Free the memory at ``address`` when all work queued on the stream so far has run."""
        with self.current():
            if self._pools:
                self._ask("cuMemFreeAsync", "freeing memory", address, stream)
            else:
                self._ask("cuMemFree", "freeing memory", address)

    def pin(self, nbytes: int) -> int:
        """Allocate pinned host memory, which devices can access directly, and return its address."""
        with self.current():
            code, address = self._cu.cuMemHostAlloc(nbytes, 1)  # PORTABLE: for all devices
            if code:
                raise failure(f"pinning {nbytes} bytes of host memory", int(code), code.name, "see ulimit -l")
        return int(address)

    def unpin(self, address: int) -> None:
        """Free the pinned memory at ``address``, which must no longer be in use. This call may wait for the device."""
        with self.current():
            self._ask("cuMemFreeHost", "freeing pinned memory", address)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy of ``nbytes`` bytes from ``source`` to ``target``.

        Each is device memory or pinned host memory.
        """
        with self.current():
            self._ask("cuMemcpyAsync", f"copying {nbytes} bytes", target, source, nbytes, stream)

    def copy_many(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Queue several copies: in one call if the driver supports this (CUDA 12.8), and otherwise one by one."""
        with self.current():
            if self._copy_bucket(targets, sources, sizes, stream):
                return
            for target, source, nbytes in zip(targets, sources, sizes):
                self._ask("cuMemcpyAsync", f"copying {nbytes} bytes", target, source, nbytes, stream)

    def _copy_bucket(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> bool:
        call = getattr(self._cu, "cuMemcpyBatchAsync", None)
        if call is None or self._version < (12, 8):
            return False
        cu = self._cu
        attributes = cu.CUmemcpyAttributes()
        attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        args: list[Any] = [list(map(cu.CUdeviceptr, targets)), list(map(cu.CUdeviceptr, sources)), list(sizes)]
        args += [len(sizes), [attributes], [0], 1]
        with contextlib.suppress(TypeError):  # the bindings for CUDA 12 had the same function with other results
            code, *_ = call(*args, stream)
            return not code
        return False

    # --- kernels

    def load(self, image: bytes, entry: str) -> Any:
        """Load compiled code into the device, and return the code's kernel ``entry``.

        ``image`` is PTX, or machine code for this device. The code stays loaded as long as the device's context exists.
        """
        with self.current():
            module = self._ask("cuModuleLoadData", f"loading the kernel {entry}", image)
            return self._ask("cuModuleGetFunction", f"finding the kernel {entry}", module, entry.encode())

    def launch(self, function: Any, blocks: int, threads: int, stream: int, parameters: int) -> None:
        """Queue the kernel ``function`` on the stream, with ``blocks`` blocks of ``threads`` threads.

        ``parameters`` is the address of an array of pointers to the arguments. The arguments are copied before this
        call returns.
        """
        with self.current():
            (code,) = self._cu.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, 0)
        if code:
            raise self._failure("launching a kernel", code)

    # --- calls and their errors

    def _load(self) -> None:
        if self._cu is not None:
            return
        try:
            from cuda.bindings import driver
        except ImportError as error:
            install = f"{pip_install('ddl-nccl[cu13]')} (or [cu12]: as the framework's CUDA)"
            raise DeviceError(f"CUDA: the package cuda-bindings is not installed; {install}") from error
        self._cu = driver
        try:
            self._ask("cuInit", "starting the driver", 0)
            version = int(self._ask("cuDriverGetVersion", "asking for the driver's version"))
        except DeviceError:
            self._cu = None
            raise
        except Exception as error:  # the bindings raise their own error if libcuda is missing
            self._cu = None
            raise DeviceError(
                "CUDA: no NVIDIA driver (libcuda.so.1 not found); install it, or start the container with --gpus all"
            ) from error
        self._version = (version // 1000, version % 1000 // 10)

    def _ask(self, call: str, what: str, *args: Any) -> Any:
        code, *results = getattr(self._cu, call)(*args)
        if code:
            raise self._failure(what, code)
        return results[0] if len(results) == 1 else results

    def _failure(self, what: str, code: Any) -> DeviceError:
        _, text = self._cu.cuGetErrorString(code)
        return failure(what, int(code), code.name, text.decode() if text else "")

    def _shortage(self, code: Any, what: str) -> DeviceError:
        if int(code) != 2:
            return self._failure(what, code)
        free, total = self.memory()
        gib = 1 << 30
        return failure(what, 2, code.name, f"{free / gib:.1f} of {total / gib:.1f} GiB are free")
