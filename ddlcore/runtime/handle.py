"""Defines the handle: the object that an asynchronous call returns, and by which the caller waits for its operation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from ddlcore.reentry import Lock
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.waiter import Waiter

_OPEN: Final[Any] = object()  # stands for an outcome that does not exist yet


class Handle:
    """The handle of one operation. Any thread may call ``wait`` and ``poll``, also after the operation has ended.

    The operation has ``entries`` tensors. ``finish`` makes the result of ``wait`` from the outcomes of these tensors.
    """

    __slots__ = (
        "_completion",
        "_error",
        "_finish",
        "_finishing",
        "_index",
        "_left",
        "_outcomes",
        "_result",
        "_then",
        "_waiter",
        "contributors",
        "submitted",
    )

    def __init__(self, waiter: Waiter, entries: int, finish: Callable[[Sequence[Outcome | None]], Any]) -> None:
        self._waiter = waiter
        self._completion = waiter.completion
        self.submitted = False  # set at the moment of submission, so that an interrupted caller can tell
        self.contributors = 0  # how many members took part with real data, known after ``wait``; 0: all of them
        self._left = entries
        self._outcomes: list[Outcome | None] = [_OPEN] * entries
        self._finish: Callable[[Sequence[Outcome | None]], Any] | None = finish
        self._finishing = Lock()
        self._error: BaseException | None = None
        self._result: Any = None
        self._index = -1
        self._then: Callable[[], None] | None = None

    def then(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once when the operation has ended, with or without an error.

        If the operation has ended already, ``call`` is called immediately. Otherwise the thread that ends the operation
        calls ``call``, and holds no lock then. So ``call`` must be short and must not raise. A handle keeps only one
        such function.
        """
        with self._completion.lock:
            if self._left > 0:
                self._then = call
                return
        call()

    def poll(self) -> bool:
        """Return whether the operation has ended, so that ``wait`` would not have to wait."""
        self._waiter.polled(self._left > 0)
        if self._left > 0:
            return False
        self._completion.observe(self._index)
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait until all ranks have taken part, and return the result. Raises the operation's error if it failed.

        PeerLost, MismatchError, Closed and related errors are described in ``ddlcore.errors``. ``timeout_s``: raise
        DeadlineExceeded after so many seconds; the operation goes on, and ``wait`` may be called again. None: the wait
        has no time limit: it ends when the operation or the job ends. If a signal handler raises an exception, that exception ends
        the wait but not the operation, and ``wait`` may be called again. Raises ReentrantCall if a signal handler or a
        finalizer calls ``wait`` after it has interrupted the work of ddl on the same thread: the thread would wait for
        itself.
        """
        if self._left > 0:
            self._waiter.wait(self, timeout_s)
        self._completion.observe(self._index)
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._finishing.refuse("wait()")
        with self._finishing:  # a waiting thread makes the outputs, and only one does
            if self._finish is not None:
                first = self._outcomes[0]
                if first is not None:
                    self.contributors = first.contributors
                self._result = self._finish(self._outcomes)
                self._finish = None
                self._outcomes = []
        return self._result

    @property
    def pending(self) -> bool:
        """Return whether the operation is in flight."""
        return self._left > 0

    @property
    def failure(self) -> BaseException | None:
        """Return the operation's error. Return None while the operation is in flight and after it has succeeded."""
        return self._error

    def over(self) -> Callable[[], None] | None:
        """Return the function that was given to ``then`` if the operation has ended. Otherwise return None.

        The function is returned only once; later calls return None. The caller holds the completion's lock, and calls
        the function after it has released that lock.
        """
        if self._left > 0:
            return None
        then, self._then = self._then, None
        return then

    def pass_on(self, queue: deque[Any]) -> None:
        """Append the function that ``over`` would return, if any, to ``queue``. The caller later calls it.

        A signal handler may interrupt this method. Then the method may be called again: the function is in ``queue`` or
        still in the handle, and is never lost.
        """
        then, put = self._then, queue.append
        if self._left > 0 or then is None:
            return
        self._then = None  # no call between this and the next
        put(then)

    def refuse(self, error: BaseException) -> None:
        """End an operation that could not be submitted. Threads that wait for the operation raise ``error``.

        Any thread may call this.
        """
        with self._completion.lock:
            self.fail(error)
            then = self.over()
        self._completion.announce()
        if then is not None:
            then()

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """Store the ``outcome`` of entry ``number`` of this handle. A repeated call for the same entry has no effect.

        ``index`` is the coordinator's index of the bucket, or -1 in replay. The caller holds the completion's lock and
        calls ``announce`` afterwards.
        """
        if self._left <= 0 or self._outcomes[number] is not _OPEN:
            return
        # ``_left`` is stored last, because ``poll`` and ``wait`` read it without a lock: a thread that reads 0 must
        # find every outcome and the index. There is no call between these stores, so a signal handler cannot leave only
        # some of them done.
        self._outcomes[number] = outcome
        if index > self._index:
            self._index = index
        self._left -= 1

    def fail(self, error: BaseException) -> None:
        """End the operation with ``error``, unless the operation has already ended.

        The caller holds the completion's lock and calls ``announce`` afterwards.
        """
        if self._left > 0:
            self._error = error
            self._left = 0
