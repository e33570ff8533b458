"""Handles the end of the main thread while other threads are still running; it knows only threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["before_threads_are_joined", "others_are_alive"]


def before_threads_are_joined(call: Callable[[], None]) -> None:
    """Register ``call`` to run when the main thread has ended, before the interpreter joins the other threads.

    ``atexit`` runs only after that join. This function does nothing if this Python has no such hook (CPython keeps it
    for concurrent.futures), or if the interpreter has already begun to end.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        try:
            register(call)
        except RuntimeError:
            return


def others_are_alive() -> bool:
    """Return whether the interpreter is going to wait for another thread when it ends."""
    main = threading.main_thread()
    return any(one is not main and not one.daemon and one.is_alive() for one in threading.enumerate())
