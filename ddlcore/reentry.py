"""Detects calls of ddl by a signal handler or a finalizer that has interrupted ddl's own work on the same thread.

Such a call must not wait for a lock that its own thread holds, and must not see a state that is only half changed.
"""

from __future__ import annotations

import sys
from _thread import RLock
from collections.abc import Callable
from typing import ClassVar

from ddlcore.errors import ReentrantCall


class Lock(RLock):  # type: ignore[misc]  # CPython's own; it may be derived from, whatever its stub says
    """A reentrant lock that knows whether the calling thread already holds it. Public functions check ``held`` first.

    A function that does not check ``held`` may see a half-changed state, but cannot cause a deadlock, because the lock
    is reentrant. A signal handler may raise an exception in a thread that holds the lock, and the lock must not stay
    locked then. So enter it only by ``with lock``, never by a Python function that does this for the caller: the handler
    may raise in that function. The block must not contain a loop, nor a comprehension with a condition; it may call a
    function that contains one. A loop may end with a conditional backward jump, which the exception tables of Python
    3.12 and later do not cover: ``with`` does not release the lock if a handler raises there.
    """

    __slots__ = ()

    # threading.Condition uses the same method.
    held: ClassVar[Callable[[Lock], bool]] = RLock._is_owned  # type: ignore[attr-defined]

    if sys.version_info >= (3, 14):
        # In Python 3.14, a signal handler may run after ``__enter__`` has returned and before ``with`` protects the block,
        # if ``__enter__`` is written in C. If it is written in Python, no handler can run at that place.

        def __enter__(self) -> bool:
            try:
                return self.acquire()
            except BaseException:
                # Call nothing before the release: a second handler could raise after that call. A thread that held the
                # lock before has always entered it once more by now, because it need not wait for the lock.
                try:  # noqa: SIM105  # what is not built in would be a call
                    self.release()
                except RuntimeError:  # the thread was waiting for the lock, and does not have it
                    pass
                raise

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
