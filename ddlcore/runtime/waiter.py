"""Makes a user thread wait for an operation. A waiting thread runs buckets itself if it can, and watches for stalls."""

from __future__ import annotations

import time
from _thread import allocate_lock
from contextlib import suppress
from typing import Protocol

from ddlcore.errors import DeadlineExceeded
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.events import NO_EVENTS, Events
from ddlcore.runtime.job_failure import JobFailure

SLICE_S = 0.1  # user threads wait in slices of this length, so that Ctrl-C works


class Waited(Protocol):
    """An operation that a thread can wait for."""

    @property
    def pending(self) -> bool: ...


class Helper(Protocol):
    """An object that runs the buckets for which threads wait. UserThreads implements this protocol."""

    def progress(self, operation: Waited) -> None:
        """Run buckets that are ready, until ``operation`` has ended or no bucket is ready.

        Does nothing if the calling thread may not run buckets now. Raises ReentrantCall if the calling thread would
        wait for itself.
        """

    def wake_for_device(self) -> None:
        """Have the engine check the devices soon, because a thread waits for an operation on a device."""


class StallCheck(Protocol):
    """An object that notices that an operation cannot end in replay. The lookout implements this protocol."""

    def check_stall(self, since_s: float) -> float:
        """Ask to leave replay if a wait that began at ``since_s`` probably cannot end otherwise.

        Return a number of seconds: the caller should call this method again after at most this time.
        """


class Until:
    """An operation for which nobody waits any more after the time ``deadline_s`` of time.monotonic."""

    __slots__ = ("_deadline_s", "_operation")

    def __init__(self, operation: Waited, deadline_s: float) -> None:
        self._operation = operation
        self._deadline_s = deadline_s

    @property
    def pending(self) -> bool:
        return self._operation.pending and time.monotonic() < self._deadline_s


class Waiter:
    """Makes the user threads of one job wait for operations. All handles and persistent requests share one object.

    A waiting thread blocks on a lock of its own, not on a shared lock. A threading.Condition cannot be used: Python
    code enters it, so the condition would stay locked if a signal handler raised an exception in that code.
    """

    def __init__(
        self,
        completion: Completion,
        helper: Helper,
        stall_watch: StallCheck,
        failure: JobFailure,
        events: Events = NO_EVENTS,
    ) -> None:
        self.completion = completion
        self.failure = failure  # the job's reason to end, which is given once it has ended
        self.waited_s = 0.0  # the sum over all threads that have waited
        self._helper = helper
        self._stall_watch = stall_watch
        self._events = events
        self._polled_since_s: float | None = None

    def wait(self, operation: Waited, timeout_s: float | None = None, since_s: float | None = None) -> None:
        """Wait until ``operation`` has ended. The calling thread first runs buckets itself, if it can.

        Raises DeadlineExceeded if ``operation`` has not ended after ``timeout_s`` seconds; it goes on. A collective that
        this thread has begun is not interrupted, so the wait may end later. None: there is no time limit. ``since_s``:
        when the caller began to wait; None: now.
        """
        since_s = time.monotonic() if since_s is None else since_s
        awaited = operation
        if timeout_s is not None:
            operation = Until(awaited, since_s + timeout_s)
        waiting = self.completion.waiting
        try:
            self._helper.progress(operation)
            while operation.pending:
                patience_s = max(min(self._stall_watch.check_stall(since_s), SLICE_S), 0.0)
                waiter = allocate_lock()
                waiter.acquire()
                waiting.append(waiter)
                # The thread that completes the operation first changes its state and then calls ``announce``. This
                # thread first appends its lock and then reads the state. In this order no wake-up is lost: either this
                # thread sees the new state, or ``announce`` finds its lock.
                if operation.pending and not waiter.acquire(True, patience_s):
                    with suppress(ValueError):  # ``announce`` has just removed it
                        waiting.remove(waiter)
        finally:
            until_s = time.monotonic()
            with self.completion.lock:
                self.waited_s += until_s - since_s
        if self._events.on:
            self._events.waited(round(since_s * 1e9), round(until_s * 1e9))
        if timeout_s is not None and awaited.pending:
            raise DeadlineExceeded(
                f"an operation has not ended within its timeout of {timeout_s:g} s: some rank has not started it, or "
                "does not answer; the report that comes after stall_warning_s names the ranks"
            )

    def wait_for_device(self, operation: Waited, timeout_s: float | None = None) -> None:
        """Do what ``wait`` does, but first have the engine check the devices soon.

        This is for an operation on a device: the device may complete the operation before the host knows that its
        bucket is valid.
        """
        mine = object()
        wanting = self.completion.wanting
        try:
            wanting[mine] = None  # a key, not a count: an interrupt cannot lose or leave one
            self._helper.wake_for_device()
            self.wait(operation, timeout_s)
        finally:
            wanting.pop(mine, None)

    def polled(self, pending: bool) -> None:
        """Record that the user has asked whether an operation has ended. ``pending`` says that it is still in flight.

        A thread that asks repeatedly counts as a waiting thread, so this method also watches for stalls.
        """
        if not pending:
            self._polled_since_s = None
        elif self._polled_since_s is None:
            self._polled_since_s = time.monotonic()
        else:
            self._stall_watch.check_stall(self._polled_since_s)
