"""One thread that carries out a transport's calls, one after the other.

Who waits within Gloo cannot be called away; who waits for a task can: it is ended from outside, and what its call
still waits for is left behind.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable

from ddlcore.contracts.transport import Work

__all__ = ["Task", "Worker"]


class Task(Work):
    """A call under way, complete or failed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._error: BaseException | None = None
        self._over = False
        self._gate = threading.Lock()  # held until it is over: cheaper to wait for than an Event
        self._gate.acquire()
        self._once = threading.Lock()

    def run(self) -> None:
        """On the worker's thread."""
        call, self._call = self._call, None
        assert call is not None
        if self._over:
            return
        try:
            call()
        except BaseException as error:  # raised again by who waits
            self.end(error)
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """It is over, whatever its call still does. The first end stands. Any thread."""
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
    """Begins with the first task, ends with ``close``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given: collections.deque[Task] = collections.deque()  # and not known to be over

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._given

    def give(self, call: Callable[[], None]) -> Task:
        """``call`` is made when those before are over."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        task = Task(call)
        self._given.append(task)
        self._queue.put(task)
        return task

    def drop(self, error: BaseException) -> None:
        """Ends with ``error`` what is under way and what is to come. Any thread."""
        for task in list(self._given):
            task.end(error)

    def close(self, timeout_s: float) -> bool:
        """Whether its thread has ended, and so every task's call."""
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
            del task  # its call may hold the group
