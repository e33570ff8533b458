"""Functions for the time when the main thread has ended and other threads are still running."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["before_threads_are_joined", "others_are_alive"]


def before_threads_are_joined(call: Callable[[], None]) -> None:
    """Register ``call`` to run when the main thread has ended, before the interpreter waits for the other threads.

    ``atexit`` handlers run only after that wait. This function does nothing if this version of Python has no hook for
    it (CPython has one for concurrent.futures), or if the interpreter has already begun to end.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        try:
            register(call)
        except RuntimeError:
            return


def others_are_alive() -> bool:
    """Return whether there is another thread for which the interpreter will wait at its end."""
    main = threading.main_thread()
    return any(one is not main and not one.daemon and one.is_alive() for one in threading.enumerate())
