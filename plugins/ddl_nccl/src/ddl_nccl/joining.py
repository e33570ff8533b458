"""Runs NCCL's init, in which all ranks meet, on a separate thread.

If another rank dies during init, init never ends. Then the thread is left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ddl_nccl.layer import Comm

SLICE_S = 0.05


class Joining:
    """A call of ``init`` on a separate thread.

    If the caller of ``wait`` has given up before ``init`` returns, the communicator is passed to ``drop``.
    """

    def __init__(self, init: Callable[[], Comm], drop: Callable[[Comm], object]) -> None:
        self._init, self._drop = init, drop
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._left = False
        self._comm: Comm = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="ddl-nccl-open", daemon=True).start()

    def wait(self, until_s: float, check: Callable[[], None]) -> Comm | None:
        """Wait for ``init`` and return its communicator, or None if ``init`` has not ended at the time ``until_s``.

        ``until_s`` is a time of time.monotonic. ``check`` is called repeatedly during the wait. Raises the exceptions
        that ``init`` or ``check`` raises.
        """
        try:
            while not self._ended.wait(min(SLICE_S, max(0.0, until_s - time.monotonic()))):
                check()
                if time.monotonic() >= until_s:
                    return None
            if self._error is not None:
                raise self._error
            check()
            with self._lock:
                comm, self._comm = self._comm, None
            return comm
        finally:
            # The thread in init may finish at any moment, also between the last check and here. The lock decides who
            # owns the communicator: either it is returned, or exactly one of the two threads drops it. A communicator
            # that nobody drops would never be freed, and one that is dropped twice would be used after it was freed.
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._left = True
            comm, self._comm = self._comm, None
        if comm is not None:
            self._drop(comm)

    def _run(self) -> None:
        try:
            comm = self._init()
            with self._lock:
                if not self._left:
                    self._comm = comm
                    return
            self._drop(comm)
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()
