"""One thread that carries out a transport's calls, one after the other.

A thread that waits inside Gloo cannot be interrupted. A thread that waits for a task can be: any other thread may end
the task. If the task's call still runs then, it is left behind.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable

from ddlcore.contracts.transport import Work


class Task(Work):
    """A call that the worker makes. It is in flight, complete or failed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._error: BaseException | None = None
        self._over = False
        # ``wait`` acquires this lock, which is held until the task is over: that is cheaper than an Event. ``end`` may
        # be called by the worker and by a thread that aborts, and releasing the lock a second time would raise, so
        # ``_once`` guards the first end.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._once = threading.Lock()

    def run(self) -> None:
        """Make the call, on the worker's thread."""
        call, self._call = self._call, None
        assert call is not None
        # A task that ended while it was queued must not run: its caller has been told that it failed, and may have
        # freed the memory that the call would write to.
        if self._over:
            return
        try:
            call()
        except BaseException as error:  # raised again by ``wait``
            self.end(error)
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """End the task, even if its call still runs. Any thread may call this; only the first call counts.

        ``error``: the error that ``wait`` raises, or None if the task is complete.
        """
        with self._once:
            if not self._over:
                self._over, self._error = True, error
                self._gate.release()

    def wait(self, timeout_s: float) -> bool:
        if not self._over:
            if not self._gate.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
                return False
            self._gate.release()
        if self._error is not None:
            raise self._error
        return True


class Worker:
    """A thread that makes calls in order. It starts with the first task and ends with ``close``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given: collections.deque[Task] = collections.deque()  # the queued tasks and the running one

    @property
    def idle(self) -> bool:
        """Return whether no task is in flight."""
        return not self._given

    def give(self, call: Callable[[], None]) -> Task:
        """Queue ``call``, which is made after the earlier calls are over, and return its task.

        Starts the thread if needed.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        task = Task(call)
        self._given.append(task)
        self._queue.put(task)
        return task

    def drop(self, error: BaseException) -> None:
        """End the running task and all queued ones with ``error``. Any thread may call it."""
        for task in list(self._given):
            task.end(error)

    def close(self, timeout_s: float) -> bool:
        """Stop the thread, and return whether it has ended within ``timeout_s``.

        If it has ended, the calls of all tasks have returned.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._queue.put(None)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            self._given.popleft()
            del task  # otherwise its call would keep the group alive while the thread waits
