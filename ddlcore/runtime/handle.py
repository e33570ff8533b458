"""Defines what a caller holds while its operation is in flight, and how threads wait for operations and are woken."""

from __future__ import annotations

import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from ddlcore.runtime.reentry import Lock

if TYPE_CHECKING:
    from _thread import LockType

    from ddlcore.observe.trace_hooks import TraceHooks
    from ddlcore.runtime.job_failure import JobFailure
    from ddlcore.runtime.outcome import Outcome

__all__ = ["Completion", "Handle", "Waited"]

SLICE_S = 0.1  # user threads wait in slices of this length, so that Ctrl-C works
_OPEN: Final[Any] = object()  # marks an outcome that has not come yet


class Waited(Protocol):
    """An operation that a thread can wait for."""

    @property
    def pending(self) -> bool: ...


class Completion:
    """The place where finished buckets are announced to waiting threads; all handles of a job share one object.

    ``observed`` is the last bucket whose end the user's code has seen. ``progress`` may run what is waited for, and
    raises ReentrantCall for a thread that would wait for itself. ``check_stall`` is told since when a thread has been
    waiting, and returns in how many seconds it must be told again.

    A waiting thread takes no shared lock; it blocks on a lock of its own. A threading.Condition would not do: it is
    entered by Python code, so it would stay locked if a signal handler raised there.
    """

    def __init__(self) -> None:
        self.lock = Lock()  # protects the state of all handles
        self._waiting: deque[LockType] = deque()
        self.observed = -1
        self.progress: Callable[[Waited], None] = lambda operation: None
        self.check_stall: Callable[[float], float] = lambda since_s: SLICE_S
        self.wake: Callable[[], None] = lambda: None  # tells the engine that a thread waits for something on a device
        self._wanting: dict[object, None] = {}
        self.failure: JobFailure | None = None  # the job's reason to end, which is given once it has ended
        self.waited_s = 0.0  # the sum over all threads that have waited
        self.trace_hooks: TraceHooks | None = None  # set while a timeline is recorded
        self._polled_since_s: float | None = None

    def wait(self, operation: Waited) -> None:
        """Block until ``operation`` is over."""
        since_s = time.monotonic()
        try:
            self.progress(operation)
            while operation.pending:
                patience_s = max(min(self.check_stall(since_s), SLICE_S), 0.0)
                waiter = allocate_lock()
                waiter.acquire()
                self._waiting.append(waiter)
                # The thread that completes the operation first changes its state and then calls ``announce``. This
                # thread first appends its lock and then reads the state. In this order no wake-up is lost: either this
                # thread sees the new state, or ``announce`` finds its lock.
                if operation.pending and not waiter.acquire(True, patience_s):
                    with suppress(ValueError):  # ``announce`` has just removed it
                        self._waiting.remove(waiter)
        finally:
            until_s = time.monotonic()
            with self.lock:
                self.waited_s += until_s - since_s
        if (hooks := self.trace_hooks) is not None:
            hooks.waited(round(since_s * 1e9), round(until_s * 1e9))

    def announce(self) -> None:
        """Wake all waiting threads, because an operation has ended. Any thread may call this.

        A lock whose thread has already gone does no harm.
        """
        waiting = self._waiting
        try:  # contextlib.suppress would take longer than everything else here
            while waiting:
                waiting.popleft().release()
        except IndexError:  # another thread is in ``announce`` as well and took the last lock
            pass

    @property
    def wanted(self) -> bool:
        """Return whether a thread waits for something on a device."""
        return bool(self._wanting)

    def wait_for_device(self, operation: Waited) -> None:
        """Wait as ``wait`` does, for what a device may complete before this host knows that it is valid."""
        mine = object()
        try:
            self._wanting[mine] = None  # a key, not a count: an interrupt cannot lose or leave one
            self.wake()
            self.wait(operation)
        finally:
            self._wanting.pop(mine, None)

    def polled(self, pending: bool) -> None:
        """Note that the user has asked whether an operation is over.

        A thread that asks repeatedly counts as a waiting thread.
        """
        if not pending:
            self._polled_since_s = None
        elif self._polled_since_s is None:
            self._polled_since_s = time.monotonic()
        else:
            self.check_stall(self._polled_since_s)

    def observe(self, index: int) -> None:
        """Note that the user's code has seen the end of bucket ``index``."""
        if index > self.observed:
            self.observed = index


class Handle:
    """An operation in flight. ``wait`` and ``poll`` may be called from any thread, also after the operation is over."""

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
        "submitted",
    )

    def __init__(self, completion: Completion, entries: int, finish: Callable[[Sequence[Outcome | None]], Any]) -> None:
        self._completion = completion
        self.submitted = False  # set at the moment of submission, so that an interrupted caller can tell
        self._left = entries
        self._outcomes: list[Outcome | None] = [_OPEN] * entries
        self._finish: Callable[[Sequence[Outcome | None]], Any] | None = finish
        self._finishing = Lock()
        self._error: BaseException | None = None
        self._result: Any = None
        self._index = -1
        self._then: Callable[[], None] | None = None

    def then(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once when the operation is over, with or without an error.

        If it is over already, ``call`` is called immediately. Otherwise it runs on the thread that ends the operation,
        with no lock held, so it must be short and must not raise. A handle takes one such call.
        """
        with self._completion.lock:
            if self._left > 0:
                self._then = call
                return
        call()

    def poll(self) -> bool:
        """Return whether ``wait`` would return or raise immediately."""
        self._completion.polled(self._left > 0)
        if self._left > 0:
            return False
        self._completion.observe(self._index)
        return True

    def wait(self) -> Any:
        """Wait until all ranks have taken part, and return the result. Raises the operation's error if it failed.

        PeerLost, MismatchError, Closed and related errors are described in ``ddlcore.errors``. The wait has no deadline
        of its own: it ends with the operation or with the job. If a signal handler raises, that ends the wait but not
        the operation, which can be waited for again. Raises ReentrantCall in a signal handler or a finalizer that has
        interrupted what it would wait for.
        """
        if self._left > 0:
            self._completion.wait(self)
        self._completion.observe(self._index)
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._finishing.refuse("wait()")
        with self._finishing:  # a waiting thread makes the outputs, and only one does
            if self._finish is not None:
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
        """Return the operation's error; None while it is in flight and after it succeeded."""
        return self._error

    def over(self) -> Callable[[], None] | None:
        """Return the function that must be called now, if there is one; it is returned only once.

        The caller holds the completion's lock.
        """
        if self._left > 0:
            return None
        then, self._then = self._then, None
        return then

    def pass_on(self, queue: deque[Any]) -> None:
        """Put the function that ``over`` would return into ``queue``, from which another thread calls it.

        After an interrupt the function is either in ``queue`` or can still be passed on.
        """
        then, put = self._then, queue.append
        if self._left > 0 or then is None:
            return
        self._then = None  # no call between this and the next
        put(then)

    def refuse(self, error: BaseException) -> None:
        """End an operation that could not even be submitted: threads that wait for it get ``error``.

        Any thread may call this.
        """
        with self._completion.lock:
            self.fail(error)
            then = self.over()
        self._completion.announce()
        if then is not None:
            then()

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """Complete one entry; a repeated call has no effect.

        The caller holds the completion's lock and calls ``announce``.
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
        """End the operation with an error. The caller holds the completion's lock and calls ``announce``."""
        if self._left > 0:
            self._error = error
            self._left = 0
