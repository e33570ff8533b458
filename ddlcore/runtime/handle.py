"""What a caller holds while its operation is under way, and the one condition that all handles of a job share."""

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
    from ddlcore.runtime.request import Outcome

__all__ = ["Completion", "Handle", "Waited"]

SLICE_S = 0.1  # users wait in slices, so that Ctrl-C works
_OPEN: Final[Any] = object()  # stands for the outcome that is still to come


class Waited(Protocol):
    """What a thread can wait for."""

    @property
    def pending(self) -> bool: ...


class Completion:
    """Where finished buckets are announced. ``observed`` is the last bucket whose end the user's code has seen.

    ``progress`` may do what is waited for, and raises ReentrantCall for a thread that would wait for itself. ``check_stall`` is
    told since when somebody waits, and says in how many seconds it wants to be told again.

    Whoever waits takes no lock of anybody's, but brings one of its own: a threading.Condition, entered in Python, would
    stay locked where a signal handler raises.
    """

    def __init__(self) -> None:
        self.lock = Lock()  # of what handles say
        self._waiting: deque[LockType] = deque()
        self.observed = -1
        self.progress: Callable[[Waited], None] = lambda operation: None
        self.check_stall: Callable[[float], float] = lambda since_s: SLICE_S
        self.wake: Callable[[], None] = lambda: None  # tells who waits for devices that somebody waits for that
        self._wanting: dict[object, None] = {}
        self.failure: JobFailure | None = None  # on the job, once it is over
        self.waited_s = 0.0  # by all threads that have waited
        self.trace_hooks: TraceHooks | None = None  # while a timeline is written
        self._polled_since_s: float | None = None

    def wait(self, operation: Waited) -> None:
        """Blocks until ``operation`` is over."""
        since_s = time.monotonic()
        try:
            self.progress(operation)
            while operation.pending:
                patience_s = max(min(self.check_stall(since_s), SLICE_S), 0.0)
                waiter = allocate_lock()
                waiter.acquire()
                self._waiting.append(waiter)
                # Whoever ends it does that first, and calls ``announce`` then: this thread sees the one or the other.
                if operation.pending and not waiter.acquire(True, patience_s):
                    with suppress(ValueError):  # it has just been announced
                        self._waiting.remove(waiter)
        finally:
            until_s = time.monotonic()
            with self.lock:
                self.waited_s += until_s - since_s
        if (hooks := self.trace_hooks) is not None:
            hooks.waited(round(since_s * 1e9), round(until_s * 1e9))

    def announce(self) -> None:
        """Something has come to its end: whoever waits looks. Any thread; a waiter that has gone is no harm."""
        waiting = self._waiting
        try:  # a context manager takes longer than all of this
            while waiting:
                waiting.popleft().release()
        except IndexError:  # another thread announces, too
            pass

    @property
    def wanted(self) -> bool:
        """Whether a thread waits for what is on a device."""
        return bool(self._wanting)

    def wait_for_device(self, operation: Waited) -> None:
        """As ``wait``, for what may be complete on the device before this host knows that it is valid."""
        mine = object()
        try:
            self._wanting[mine] = None  # not a count: interrupted at any moment, it is neither lost nor left
            self.wake()
            self.wait(operation)
        finally:
            self._wanting.pop(mine, None)

    def polled(self, pending: bool) -> None:
        """Somebody has asked whether an operation is over: who asks again and again, waits."""
        if not pending:
            self._polled_since_s = None
        elif self._polled_since_s is None:
            self._polled_since_s = time.monotonic()
        else:
            self.check_stall(self._polled_since_s)

    def observe(self, index: int) -> None:
        """The user's code has seen the end of bucket ``index``."""
        if index > self.observed:
            self.observed = index


class Handle:
    """An operation under way. ``wait`` and ``poll`` may be called from any thread, and again when it is over."""

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
        self.submitted = False  # set in the moment of it: who is interrupted in TensorQueue.submit can tell
        self._left = entries
        self._outcomes: list[Outcome | None] = [_OPEN] * entries
        self._finish: Callable[[Sequence[Outcome | None]], Any] | None = finish
        self._finishing = Lock()
        self._error: BaseException | None = None
        self._result: Any = None
        self._index = -1
        self._then: Callable[[], None] | None = None

    def then(self, call: Callable[[], None]) -> None:
        """Has ``call`` made once, when the operation is over, one way or the other; at once where it is.

        On whatever thread ends it, with no lock held: it must be short, and raise nothing. One call a handle.
        """
        with self._completion.lock:
            if self._left > 0:
                self._then = call
                return
        call()

    def poll(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        self._completion.polled(self._left > 0)
        if self._left > 0:
            return False
        self._completion.observe(self._index)
        return True

    def wait(self) -> Any:
        """The result, when all ranks have taken part. Raises what became of the operation otherwise.

        PeerLost, MismatchError, Closed and their kin are described in ``ddlcore.errors``. The wait
        has no deadline of its own: it ends with the operation or with the job. A signal handler that raises ends the
        wait, not the operation: it may be waited for again. ReentrantCall for a handler or a finalizer that interrupts
        what it waits for.
        """
        if self._left > 0:
            self._completion.wait(self)
        self._completion.observe(self._index)
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._finishing.refuse("wait()")
        with self._finishing:  # outputs are made by a thread that waits, once
            if self._finish is not None:
                self._result = self._finish(self._outcomes)
                self._finish = None
                self._outcomes = []
        return self._result

    @property
    def pending(self) -> bool:
        """Whether it is under way."""
        return self._left > 0

    @property
    def failure(self) -> BaseException | None:
        """The operation's error; None while it is under way, and where it went well."""
        return self._error

    def over(self) -> Callable[[], None] | None:
        """The call that is to be made now, if there is one; only once. The caller holds the completion's lock."""
        if self._left > 0:
            return None
        then, self._then = self._then, None
        return then

    def pass_on(self, queue: deque[Any]) -> None:
        """As ``over``: puts the call into ``queue``, from which another thread makes it. It is there, or still to come."""
        then, put = self._then, queue.append
        if self._left > 0 or then is None:
            return
        self._then = None  # no call between this and the next
        put(then)

    def refuse(self, error: BaseException) -> None:
        """The operation could not even be handed over: whoever waits gets ``error``. Any thread."""
        with self._completion.lock:
            self.fail(error)
            then = self.over()
        self._completion.announce()
        if then is not None:
            then()

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """One entry is done; again: no effect. The caller holds the completion's lock, and announces."""
        if self._left <= 0 or self._outcomes[number] is not _OPEN:
            return
        self._outcomes[number] = outcome
        if index > self._index:
            self._index = index
        self._left -= 1

    def fail(self, error: BaseException) -> None:
        """The operation is over, with an error. The caller holds the completion's lock, and announces."""
        if self._left > 0:
            self._error = error
            self._left = 0
