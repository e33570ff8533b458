"""Joins, calls, watches and ends one communicator of NCCL. This module knows no collective."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ddl_nccl import surroundings
from ddl_nccl._raw import load
from ddl_nccl.codes import IN_PROGRESS, SUCCESS
from ddl_nccl.errors import explained, meaning
from ddl_nccl.joining import Joining
from ddl_nccl.layer import Raw
from ddl_nccl.library import spelled
from ddl_nccl.marks import Marks
from ddl_nccl.meeting import Arrival, meet
from ddl_nccl.queued import QueuedWork
from ddl_nccl.watchdog import bounded
from ddlcore.contracts.device import Queue
from ddlcore.contracts.transport import Context
from ddlcore.errors import DdlInternalError, DeadlineExceeded, TransportError

log = logging.getLogger("ddl")

GRACE_S = 3.0  # after an error of NCCL, how long the job may take to report a lost rank before we abort by ourselves
CALL_S = 0.3  # how long aborting a communicator waits for a call in progress
ABORT_S = 0.8  # how long abort waits for NCCL's abort, CALL_S included; it continues in the background
CLOSE_S = 2.0  # how long close waits for the queue, and for NCCL


class NcclCommunicator:
    """This rank's communicator of NCCL, from the meeting of the ranks until it is closed or aborted.

    ``raw`` is NCCL itself, or a stand-in for NCCL; None: ``join`` loads NCCL. One thread makes the calls. Any thread
    may call ``check`` and ``abort``, and the watchdog's thread calls ``look``.
    """

    def __init__(self, raw: Raw | None) -> None:
        self.name = "the communicator"  # in messages
        self.marks = Marks(0.0)  # the deadlines of what is queued
        self._given = raw
        self._raw: Raw
        self._comm: Any = None
        self._context: Context
        self._queue: Queue
        self._lock = threading.Lock()  # protects the communicator from being ended while the watchdog looks at it
        self._calling = threading.Lock()  # held during a call
        self._over = threading.Event()  # aborted or closed: a join in progress gives up
        self._failure: DdlInternalError | None = None
        self._failed_s = 0.0
        self._open_until_s = 0.0  # a deadline while the first reduction runs: the call itself may wait for a peer

    # --- life

    def prepare(self, context: Context) -> Queue:
        """Use the ranks and settings of ``context`` from now on, and return its queue, on which NCCL will be called.

        Raises TransportError if there is no queue, because the group has no device.
        """
        self._context = context
        self.name = f"communicator {context.name or '(unnamed)'}"
        if context.queue is None:
            raise TransportError(
                f"nccl: {self.name} serves host memory, which NCCL does not reach; use another --backend"
            )
        self._queue = context.queue
        self.marks = Marks(float(context.settings.get("nccl_timeout_s", 0.0)))
        return self._queue

    def join(self, until_s: float) -> Raw:
        """Meet the other ranks, create the communicator with them, and return NCCL, or the stand-in for NCCL.

        ``until_s`` is the deadline, a time of time.monotonic. Raises DeadlineExceeded if it passes, and TransportError
        if the communicator cannot be created, or is aborted meanwhile.
        """
        context, runtime = self._context, self._queue.runtime
        version, trouble = 0, ""
        try:
            surroundings.tell(os.environ, context.settings)
            self._raw = self._given or load()
            version = self._raw.version()
            surroundings.warn(context, version)
        except Exception as error:  # the other ranks must be told, or they would wait
            trouble = str(explained("loading NCCL", error))
        me = context.members[context.rank]
        device = surroundings.identity(os.environ, runtime.identity)
        arrival = Arrival(me.rank, me.host, device, version, trouble)
        unique_id = meet(context, arrival, self._unique_id, self._check_opening)
        log.debug("nccl: %s meets by NCCL %s on %s", self.name, spelled(version), runtime.device)
        name = f"ddl-{context.name}"[:64]

        def init() -> Any:
            try:
                with runtime.current():
                    return self._raw.init(context.size, unique_id, context.rank, runtime.device.index, name)
            except Exception as error:
                raise self._explained(f"opening {self.name}", error) from error

        joining = Joining(init, self._abort_comm)
        comm = joining.wait(until_s, self._check_opening)
        if comm is None:
            raise DeadlineExceeded(f"nccl: the ranks of {self.name} did not connect in {context.timeout_s:g} s")
        with self._lock:
            self._comm = comm
        return self._raw

    def _unique_id(self) -> bytes:
        with self._queue.runtime.current():
            return self._raw.unique_id()

    def _check_opening(self) -> None:
        if self._over.is_set():
            raise self._failure or TransportError(f"nccl: {self.name} was closed while it opened")

    def connect(self, until_s: float, first: Callable[[], object]) -> None:
        """Make the call ``first``, which makes NCCL connect the GPUs, and wait for what it has queued.

        So if the GPUs cannot connect, this method raises DeadlineExceeded, and not a later step. ``until_s`` is the
        deadline, a time of time.monotonic.
        """
        self._open_until_s = until_s
        self.call("connecting", first)
        if not QueuedWork(self.check, self._queue.record(), "connecting").wait(max(0.0, until_s - time.monotonic())):
            raise self._unreached()
        self._open_until_s = 0.0

    def _unreached(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"nccl: GPUs of {self.name} did not reach each other in {self._context.timeout_s:g} s; set "
            "NCCL_P2P_DISABLE=1 where ranks see different devices, or run it again with NCCL_DEBUG=INFO"
        )

    def close(self) -> None:
        """Free the communicator. Waits up to CLOSE_S seconds each for the queue and for NCCL."""
        self._over.set()
        comm = self._taken()
        if comm is not None:
            whole = self._failure is None and self.drained()
            end = self._destroy_comm if whole else self._abort_comm
            if not bounded("close", lambda: end(comm), CLOSE_S):
                log.info(
                    "nccl: closing %s takes more than %g s and goes on by itself: NCCL waits until the other ranks of "
                    "this host close theirs", self.name, CLOSE_S
                )  # fmt: skip
        self.marks = Marks(0.0)

    def drained(self) -> bool:
        """Wait up to CLOSE_S seconds, and return whether all queued work has run.

        NCCL can destroy the communicator normally only if all work has run.
        """
        try:
            return self._queue.record().wait(CLOSE_S)
        except DdlInternalError:
            return False

    def abort(self) -> None:
        """End all calls, also those that wait for a lost rank, and free the communicator. Any thread may call this."""
        self._fail(TransportError(f"nccl: {self.name} was aborted here"))
        self._over.set()
        self._end(ABORT_S)

    def _end(self, wait_s: float) -> None:
        """Abort the communicator, and wait up to ``wait_s`` seconds until NCCL has done so.

        Calls of NCCL that wait on the device end without a result: the queue continues, and their memory holds garbage.
        """
        comm = self._taken()
        if comm is not None and not bounded("abort", lambda: self._abort_comm(comm), wait_s):
            log.debug("nccl: %s is still being aborted", self.name)

    # NCCL uses the context that is current in the calling thread, and creates one on the host's first device if there
    # is none. The threads that abort or destroy a communicator have no current context, so it is entered here.

    def _abort_comm(self, comm: Any) -> None:
        # NCCL's abort frees what a call in progress still uses, so wait for that call. But a call that waits for a dead
        # peer ends only by the abort, so wait only for a limited time.
        waited = self._calling.acquire(timeout=CALL_S)
        try:
            with self._queue.runtime.current():
                self._raw.abort(comm)
        finally:
            if waited:
                self._calling.release()

    def _destroy_comm(self, comm: Any) -> None:
        with self._queue.runtime.current():
            self._raw.destroy(comm)

    def _taken(self) -> Any:
        with self._lock:
            comm, self._comm = self._comm, None
        return comm

    def disown(self) -> None:
        """Forget the communicator in a forked process, which must not use what the parent process has opened."""
        self._lock, self._calling = threading.Lock(), threading.Lock()
        self._comm = None

    # --- calls

    def on(self) -> tuple[Any, int]:
        """Return the communicator and the stream, which are the last arguments of each call of NCCL."""
        return self._comm, self._queue.handle

    def call(self, what: str, call: Callable[[], object]) -> None:
        """Run ``call``, which calls NCCL on this communicator. ``what`` is its name in messages.

        Raises the communicator's error, after which no call is possible any more.
        """
        self.check(what)
        if self._comm is None:
            raise TransportError(f"nccl: {self.name} is not open")
        try:
            with self._calling, self._queue.runtime.current():
                call()
        except Exception as error:
            self.check(what)  # if the communicator was aborted meanwhile, that error says more
            failure = self._explained(f"{what} on {self.name}", error)
            self._fail(failure)
            raise failure from error

    # --- what goes wrong

    def check(self, what: str = "a call") -> None:
        """Raise an error if this communicator has failed or was aborted. Any thread may call this method.

        ``what`` is the name of the call that cannot be made. The name appears in the message.
        """
        if self._failure is not None:
            kind = DeadlineExceeded if isinstance(self._failure, DeadlineExceeded) else TransportError
            raise kind(f"{self._failure} (during {what})") from self._failure

    def look(self) -> None:
        """Check the communicator for errors and deadlines. The watchdog thread calls this method every 0.1 s."""
        with self._lock:
            if self._comm is None:
                return
            try:
                state = self._raw.state(self._comm)
                account = "" if state in (SUCCESS, IN_PROGRESS) else self._raw.last_error(self._comm)
            except Exception as error:
                self._fail(self._explained(f"looking at {self.name}", error))
                return
        if state not in (SUCCESS, IN_PROGRESS):
            self._fail(meaning(self.name, state, account))
        self._look_at_marks()
        if self._open_until_s and time.monotonic() > self._open_until_s:
            self._fail(self._unreached())
            self._end(ABORT_S)
            return
        # The job knows better which rank is lost, and will abort this transport. If the watchdog ended the calls
        # sooner, the queue would continue with garbage in the memory before the job's error is known.
        if self._failure is not None and time.monotonic() - self._failed_s > GRACE_S:
            log.error("%s", self._failure)
            self._end(ABORT_S)

    def _look_at_marks(self) -> None:
        marks = self.marks
        try:
            if marks.late():
                took = f"was not complete after {marks.patience_s:g} s (DDL_NCCL_TIMEOUT_S)"
                self._fail(TransportError(f"nccl: a bucket on {self.name} {took}"))
        except DdlInternalError as error:  # the device itself failed
            self._fail(error)

    def _fail(self, failure: DdlInternalError) -> None:
        if self._failure is None:
            self._failed_s = time.monotonic()
            self._failure = failure

    def _explained(self, what: str, error: Exception) -> DdlInternalError:
        account = ""
        if not isinstance(error, DdlInternalError) and hasattr(self, "_raw"):
            try:
                account = self._raw.last_error(self._comm)
            except Exception as untold:  # the description is optional
                log.debug("nccl: no account of an error: %s", untold)
        return explained(what, error, account)
