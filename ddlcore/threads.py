"""Know ddl's own threads, from the moment at which they are started.

The garbage collector runs finalizers on any thread, at any moment: also on a thread of ddl, even before the thread's
function has begun. Another thread may hold a lock of ddl while it waits for that thread, for example for its start. If
the finalizer waited for this lock, both threads would wait for ever. So the public functions that take such a lock
refuse calls on ddl's own threads.
"""

from __future__ import annotations

import os
import threading
from typing import Any

__all__ = ["OwnThread", "on_own_thread"]

_started: dict[OwnThread, None] = {}  # adding and removing one key is atomic


class OwnThread(threading.Thread):
    """A daemon thread of ddl. ``on_own_thread`` returns True on it, until its function has returned."""

    def __init__(self, **rest: Any) -> None:
        """Create the thread, with the keyword arguments of ``threading.Thread``."""
        super().__init__(daemon=True, **rest)

    def start(self) -> None:
        """Start the thread, and return when it runs. Raises RuntimeError if the system has no more threads."""
        _started[self] = None
        try:
            super().start()
        except RuntimeError:
            _started.pop(self, None)
            raise

    def run(self) -> None:
        """Call the thread's function."""
        try:
            super().run()
        finally:
            # Not later: the system may give the thread's ident to another thread before `is_alive` says that it ended.
            _started.pop(self, None)


def on_own_thread() -> bool:
    """Return whether the calling thread is one of ddl's own."""
    me = threading.get_ident()
    return any(one.ident == me for one in list(_started))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_started.clear)  # none of them is in the child
