"""The thread that owns the transport across hosts: it opens the transport, runs tasks on it in order, and closes it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from ddlcore.contracts.transport import Context, Transport, Work
from ddlcore.errors import DeadlineExceeded, TransportError

Task = Callable[[Transport], Work]

SLICE_S = 0.1  # how soon a wait that is not notified notices that it must stop
LATE_S = 5.0  # how long after its deadline an opening may continue
END_S = 2.0  # how long close() waits for the thread


class Crossing:
    """One communicator across hosts, and the thread that uses it.

    One other thread, the caller's, calls ``begin``, ``opened``, ``put``, ``wait`` and ``close``. If the transport
    fails, ``opened`` or ``wait`` raises its error, and every later call of these two that has to wait raises it again.
    """

    def __init__(self, make: Callable[[], Transport]) -> None:
        self._make = make
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._transport: Transport | None = None  # set while it opens and until it is closed
        self._thread: threading.Thread | None = None
        self._opened = False
        self._aborted = False
        self._error: BaseException | None = None
        self._put = 0
        self._done = 0

    def begin(self, context: Context) -> None:
        """Start to open the communicator on the thread, and return at once. ``opened`` waits until it is open."""
        self._name = context.name
        self._thread = threading.Thread(target=self._live, args=(context,), name="ddl-crossing", daemon=True)
        self._thread.start()

    def opened(self, timeout_s: float) -> None:
        """Wait until the communicator is open.

        Raises the error with which the opening failed, and DeadlineExceeded 5 s after ``timeout_s``.
        """
        until_s = time.monotonic() + timeout_s + LATE_S
        with self._changed:
            while not self._opened:
                self._check()
                if time.monotonic() > until_s:
                    raise DeadlineExceeded(f"{self._name} was not open after {timeout_s + LATE_S:g} s")
                self._changed.wait(SLICE_S)

    def put(self, task: Task) -> int:
        """Queue ``task``, and return its ticket for ``wait``.

        The thread runs the tasks in order. It begins the next task when the Work of the task before is complete.
        """
        self._tasks.put(task)
        self._put += 1
        return self._put

    def wait(self, ticket: int) -> None:
        """Wait until the task of ``ticket`` is done.

        If this task or an earlier one has failed, raises its error. Raises TransportError after ``abort``.
        """
        with self._changed:
            while self._done < ticket:
                self._check()
                self._changed.wait(SLICE_S)

    def abort(self) -> None:
        """Abort the communicator. Any thread may call this.

        Threads that wait in ``opened`` or ``wait`` raise now. The crossing's own thread raises as soon as its transport
        can.
        """
        with self._changed:
            self._aborted = True
            transport = self._transport
            self._changed.notify_all()
        if transport is not None and transport.capabilities.abort:
            transport.abort()

    def close(self) -> None:
        """Close the transport and end the thread. A thread whose call cannot be aborted may be left running."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(END_S)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._aborted:
            raise TransportError(f"{self._name} was aborted here")

    # --- run by the thread

    def _live(self, context: Context) -> None:
        transport = None
        try:
            transport = self._make()
            with self._changed:
                self._transport = transport
                self._check()
            transport.open(context)
            with self._changed:
                self._opened = True
                self._changed.notify_all()
            self._work(transport)
        except BaseException as error:  # of any kind: the waiting thread must get it
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            with self._changed:
                self._transport = None  # a closed transport must not be aborted
            if transport is not None:
                _close(transport)

    def _work(self, transport: Transport) -> None:
        while (task := self._tasks.get()) is not None:
            finish(task(transport), self._stop)
            with self._changed:
                self._done += 1
                self._changed.notify_all()
            del task  # the task holds memory of a collective that has ended

    def _stop(self) -> None:
        if self._aborted:
            raise TransportError(f"{self._name} was aborted here")


def finish(work: Work, check: Callable[[], None]) -> None:
    """Wait until ``work`` is complete, however slow the peers are.

    ``check`` is called repeatedly, and raises to end the wait.
    """
    while not work.wait(SLICE_S):
        check()


def _close(transport: Transport) -> None:
    with contextlib.suppress(Exception):  # nobody could handle the error any more
        transport.close()
