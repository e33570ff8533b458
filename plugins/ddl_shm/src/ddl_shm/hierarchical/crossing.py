"""The thread that owns the transport across hosts: it opens the transport, runs tasks on it in order, and closes it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from ddlcore.contracts.transport import Context, Transport, Work
from ddlcore.errors import DeadlineExceeded, TransportError
from ddlcore.threads import OwnThread

Task = Callable[[Transport], Work]

SLICE_S = 0.1  # how soon a wait that is not notified notices that it must stop
LATE_S = 5.0  # how long after its deadline an opening may continue
END_S = 2.0  # how long close() waits for the thread


class Crossing:
    """A communicator across hosts, with a thread of its own that makes all calls of this communicator.

    The methods ``begin``, ``opened``, ``put``, ``wait`` and ``close`` are all called by one other thread, the caller.
    If the transport across hosts fails, ``opened`` and ``wait`` raise its error in the caller. There are two
    exceptions: ``opened`` returns if the communicator was opened before the failure, and ``wait`` returns if its task
    was completed before the failure.
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
        """Start the thread, which opens the communicator, and return at once.

        ``opened`` waits until the communicator is open.
        """
        self._name = context.name
        self._thread = OwnThread(target=self._live, args=(context,), name="ddl-crossing")
        self._thread.start()

    def opened(self, timeout_s: float) -> None:
        """Wait until the communicator is open.

        If opening it fails, the error is raised here. Raises DeadlineExceeded if the communicator is not open after
        ``timeout_s`` plus 5 s, and TransportError after ``abort``.
        """
        until_s = time.monotonic() + timeout_s + LATE_S
        with self._changed:
            while not self._opened:
                self._check()
                if time.monotonic() > until_s:
                    raise DeadlineExceeded(f"{self._name} was not open after {timeout_s + LATE_S:g} s")
                self._changed.wait(SLICE_S)

    def put(self, task: Task) -> int:
        """Add ``task`` to the queue of the thread, and return a ticket: a number that is passed to ``wait``.

        The thread runs the tasks in order. Before it begins a task, it waits until the Work that the previous task
        returned is complete.
        """
        self._tasks.put(task)
        self._put += 1
        return self._put

    def wait(self, ticket: int) -> None:
        """Wait until the task for which ``put`` returned ``ticket`` is complete.

        If this task or an earlier task has failed, the error of the failed task is raised here. Raises TransportError
        after ``abort``.
        """
        with self._changed:
            while self._done < ticket:
                self._check()
                self._changed.wait(SLICE_S)

    def abort(self) -> None:
        """Abort the communicator. Any thread may call this method.

        A thread that waits in ``opened`` or ``wait`` raises TransportError at once. The crossing's own thread ends as
        soon as the transport's pending call can be interrupted.
        """
        with self._changed:
            self._aborted = True
            transport = self._transport
            self._changed.notify_all()
        if transport is not None and transport.capabilities.abort:
            transport.abort()

    def close(self) -> None:
        """Ask the thread to close the transport and to end, and wait up to 2 s for the end of the thread.

        If the thread is in a call of the transport that cannot be aborted, the thread may be left running.
        """
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
    """Wait without a time limit until ``work`` is complete.

    ``check`` is called every 0.1 s during the wait. If ``check`` raises an exception, the wait ends with this
    exception.
    """
    while not work.wait(SLICE_S):
        check()


def _close(transport: Transport) -> None:
    with contextlib.suppress(Exception):  # nobody could handle the error any more
        transport.close()
