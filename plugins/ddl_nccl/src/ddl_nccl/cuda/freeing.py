"""A thread that frees device memory once the device has done all that was queued when it was let go, on any stream.

Memory becomes tensors of a framework, whose kernels run on streams of which we know nothing; so the streams
that we do know do not tell when it is out of use.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from ddlcore.errors import DeviceError

if TYPE_CHECKING:
    from ddl_nccl.cuda.queue import CudaEvent
    from ddl_nccl.cuda.runtime import CudaDevice

__all__ = ["Freeing"]

SLICE_S = 1.0  # of a wait for the device, after which it is looked whether the device was closed
log = logging.getLogger("ddl")


class Freeing:
    """``let_go`` from any thread, finalisers among them; nothing that it does waits."""

    def __init__(self, device: CudaDevice, stream: int) -> None:
        self._device = device
        self._stream = stream
        self._closed = False
        # Its put() may be interrupted by another in the same thread, as finalisers do; that of queue.Queue may not.
        self._gone: queue.SimpleQueue[int | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"ddl-free-{device.device}", daemon=True)
        self._thread.start()

    def let_go(self, address: int) -> None:
        """Memory of the device, which nobody but the device uses any more."""
        self._gone.put(address)

    def settle(self, timeout_s: float) -> bool:
        """Blocks until what was let go so far is free; False when ``timeout_s`` passed first."""
        free = threading.Event()
        self._gone.put(free)
        return free.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Frees what the device is done with within ``timeout_s``; the rest ends with the process."""
        self._gone.put(None)
        self._thread.join(timeout_s)
        self._closed = True
        self._thread.join(2 * SLICE_S)

    def _run(self) -> None:
        going_on = True
        gone: list[int] = []
        while going_on:
            found = [self._gone.get()]
            while not self._gone.empty():
                found.append(self._gone.get())
            going_on = None not in found
            gone += [one for one in found if isinstance(one, int)]
            try:
                self._free(gone)
            except DeviceError as error:  # it may be no more than a capture of a graph: again with what comes next
                log.debug("freeing memory: %s", error)
            for one in found:
                if isinstance(one, threading.Event):
                    one.set()

    def _free(self, addresses: list[int]) -> None:
        if addresses and self._reached(self._device.record_all(self._stream)):
            while addresses:
                self._device.driver.free(addresses[-1], self._stream)
                addresses.pop()

    def _reached(self, event: CudaEvent) -> bool:
        while not self._closed:
            if event.wait(SLICE_S):
                return True
        return False
