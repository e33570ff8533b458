"""NCCL's own meeting of the ranks, on a thread that can be left behind: nothing ends it where a peer dies in its midst."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ddl_nccl.layer import Comm

__all__ = ["Joining"]

SLICE_S = 0.05


class Joining:
    """``init`` is called at once. A communicator that comes when nobody waits for it any more is given to ``drop``."""

    def __init__(self, init: Callable[[], Comm], drop: Callable[[Comm], object]) -> None:
        self._init, self._drop = init, drop
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._left = False
        self._comm: Comm = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="ddl-nccl-open", daemon=True).start()

    def wait(self, until_s: float, check: Callable[[], None]) -> Comm | None:
        """The communicator; None past ``until_s`` (of time.monotonic). Raises what ``init`` raised, or ``check``."""
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
