"""Frees device memory in a thread, when the device has finished all work that was queued earlier, on any stream.

The memory becomes tensors of a framework, whose kernels run on streams that ddl does not know. So ddl's own streams
cannot tell when the memory is out of use.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ddlcore.contracts.device import Event
from ddlcore.errors import DeviceError
from ddlcore.types import Device

SLICE_S = 1.0  # wait for the device this long before checking again whether it was closed
log = logging.getLogger("ddl")


class Freeing:
    """A thread that frees device memory. Any thread and any finalizer may call ``let_go``, which never blocks.

    ``record_all`` returns an event that is done when all work queued so far in the process has run. ``free`` frees the
    memory at an address.
    """

    def __init__(self, device: Device, record_all: Callable[[], Event], free: Callable[[int], None]) -> None:
        self._record_all = record_all
        self._free_now = free
        self._closed = False
        # A finalizer may call put() while the same thread is in put(): SimpleQueue allows that, queue.Queue does not.
        self._gone: queue.SimpleQueue[int | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"ddl-free-{device}", daemon=True)
        self._thread.start()

    def let_go(self, address: int) -> None:
        """Free the device memory at ``address`` later.

        Only work that is already queued on the device may still use the memory.
        """
        self._gone.put(address)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all memory passed to ``let_go`` so far is free.

        Return False if ``timeout_s`` seconds pass first.
        """
        free = threading.Event()
        self._gone.put(free)
        return free.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Free all memory that the device stops using within ``timeout_s`` seconds, and end the thread.

        All other memory is freed when the process ends.
        """
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
            except DeviceError as error:  # perhaps a graph is being captured: try again with the next memory
                log.debug("freeing memory: %s", error)
            for one in found:
                if isinstance(one, threading.Event):
                    one.set()

    def _free(self, addresses: list[int]) -> None:
        # The order of addresses[-1] and pop() matters: if free() raises, the address stays in the list, and is freed in
        # a later round instead of being lost.
        if addresses and self._reached(self._record_all()):
            while addresses:
                self._free_now(addresses[-1])
                addresses.pop()

    def _reached(self, event: Event) -> bool:
        while not self._closed:
            if event.wait(SLICE_S):
                return True
        return False
