"""Detects calls of ddl by a signal handler or a finalizer that has interrupted ddl's own work on the same thread.

Such a call must not wait for a lock that its own thread holds, and must not see a state that is only half changed.
"""

from __future__ import annotations

from _thread import RLock
from collections.abc import Callable
from typing import ClassVar

from ddlcore.errors import ReentrantCall


class Lock(RLock):  # type: ignore[misc]  # CPython's own; it may be derived from, whatever its stub says
    """A reentrant lock that knows whether the calling thread already holds it. Public functions check ``held`` first.

    A function that does not check ``held`` may see a half-changed state, but cannot cause a deadlock, because the lock
    is reentrant. Enter the lock only by ``with lock``, never by a Python function that does this for the caller: a
    signal handler may raise an exception in that function, and then the lock stays locked.
    """

    __slots__ = ()

    # threading.Condition uses the same method.
    held: ClassVar[Callable[[Lock], bool]] = RLock._is_owned  # type: ignore[attr-defined]

    def refuse(self, what: str) -> None:
        """Raise ReentrantCall if the calling thread holds this lock. ``what`` names the call in the message."""
        if self.held():
            raise reentrant(what)


def reentrant(what: str) -> ReentrantCall:
    """Return the error for a call that a signal handler or a finalizer must not make now.

    ``what`` names the call in the message.
    """
    return ReentrantCall(
        f"{what} was called by a signal handler or a finalizer (__del__, a weakref's callback) while its thread was "
        "inside ddl; note it in a variable there, and make the call when ddl's own call has returned"
    )
