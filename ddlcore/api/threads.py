"""The end of the main thread, and who is left then; knows threads only."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["before_threads_are_joined", "others_are_alive"]


def before_threads_are_joined(call: Callable[[], None]) -> None:
    """Has ``call`` made when the main thread has ended: before the interpreter waits for threads, which ``atexit`` is behind.

    Nothing, where this Python has no such place (CPython keeps it for concurrent.futures), or its end has begun.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        try:
            register(call)
        except RuntimeError:
            return


def others_are_alive() -> bool:
    """Whether the interpreter will wait for a thread at its end."""
    main = threading.main_thread()
    return any(one is not main and not one.daemon and one.is_alive() for one in threading.enumerate())
