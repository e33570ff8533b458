"""A worker thread that makes a transport's calls, one after the other.

A thread that waits inside Gloo cannot be interrupted. Therefore other threads wait for a task of the worker instead:
any thread may end the task, and with it the wait. If the task's call still runs then, nobody waits for it any more.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable

from ddlcore.contracts.transport import Work


class WorkerTask(Work):
    """A call that the worker thread makes. A task is in flight, complete or failed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._error: BaseException | None = None
        self._over = False
        # This lock is released when the task ends, and ``wait`` acquires it; a lock is cheaper than an Event. Both the
        # worker and an aborting thread may call ``end``. A second release of the lock would raise an exception, so
        # ``_once`` makes sure that there is only one.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._once = threading.Lock()

    def run(self) -> None:
        """Make the call. Only the worker thread calls this method."""
        call, self._call = self._call, None
        assert call is not None
        # If the task was ended while it was queued, the call must not run: the thread that waited for the task has got
        # an error, and may have freed the memory to which the call would write.
        if self._over:
            return
        try:
            call()
        except BaseException as error:  # raised again by ``wait``
            self.end(error)
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """End the task, even if its call still runs. Any thread may call this method; only the first call counts.

        ``error`` is the error that ``wait`` will raise, or None if the task is complete.
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
    """A thread that makes calls, one after the other. The thread starts with the first task, and ends at ``close``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[WorkerTask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given: collections.deque[WorkerTask] = collections.deque()  # the queued tasks and the running one

    @property
    def idle(self) -> bool:
        """Whether no task is queued or running."""
        return not self._given

    def give(self, call: Callable[[], None]) -> WorkerTask:
        """Queue ``call``, and return its task. The thread makes the call after all earlier calls have returned.

        Start the thread if it does not run yet.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        task = WorkerTask(call)
        self._given.append(task)
        self._queue.put(task)
        return task

    def drop(self, error: BaseException) -> None:
        """End the running task and all queued tasks with ``error``. Any thread may call this method."""
        for task in list(self._given):
            task.end(error)

    def close(self, timeout_s: float) -> bool:
        """Stop the thread after all queued calls, and return whether the thread has ended within ``timeout_s`` seconds.

        If the thread has ended, the calls of all tasks have returned.
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
