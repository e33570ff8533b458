"""Functions for the end of a program, when the main thread has ended and other threads are still running."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["before_threads_are_joined", "others_are_alive"]


def before_threads_are_joined(call: Callable[[], None]) -> None:
    """Register ``call`` to run after the end of the main thread, before the interpreter waits for the other threads.

    ``atexit`` handlers run too late for this: after the interpreter has waited for these threads. CPython has a hook
    for concurrent.futures, which this function uses. This function does nothing if this version of Python has no such
    hook, or if the interpreter has already begun to end.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        try:
            register(call)
        except RuntimeError:
            return


def others_are_alive() -> bool:
    """Return whether the interpreter will wait at its end for a thread other than the main thread."""
    main = threading.main_thread()
    return any(one is not main and not one.daemon and one.is_alive() for one in threading.enumerate())
