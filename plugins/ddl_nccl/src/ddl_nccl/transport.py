"""The transport over NCCL. It translates each collective into calls of NCCL, on one stream of one device."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from ddl_nccl import surroundings
from ddl_nccl._raw import load
from ddl_nccl.codes import BYTES, CARRIED, IN_PROGRESS, OPS, SUCCESS, TYPES, native
from ddl_nccl.errors import explained, meaning
from ddl_nccl.joining import Joining
from ddl_nccl.layer import Raw
from ddl_nccl.library import spelled
from ddl_nccl.marks import Marks
from ddl_nccl.meeting import Arrival, meet
from ddl_nccl.queued import Queued
from ddl_nccl.reductions import OwnReductions
from ddl_nccl.watchdog import bounded, unwatch, watch
from ddlcore.contracts.device import Queue
from ddlcore.contracts.transport import ALL_OPS, DONE, Capabilities, Context, Transport, Work, dense
from ddlcore.errors import DdlInternalError, DeadlineExceeded, TransportError
from ddlcore.types import Buffer, DType, ReduceOp

log = logging.getLogger("ddl")

GRACE_S = 3.0  # after an error of NCCL, how long the job may take to report a lost rank before we abort by ourselves
CALL_S = 0.3  # how long aborting a communicator waits for a call in progress
ABORT_S = 0.8  # how long abort waits for NCCL's abort, CALL_S included; it continues in the background
CLOSE_S = 2.0  # how long close waits for the queue, and for NCCL


class NcclTransport(Transport):
    """A transport for any number of ranks on any hosts, each with its own GPU.

    Calls of NCCL are queued on ``context.queue``. ``raw`` is NCCL itself, or a stand-in for NCCL; by default ``open``
    loads NCCL.
    """

    capabilities = Capabilities(
        devices=frozenset({"cuda"}), ops=ALL_OPS | {ReduceOp.Average}, stream_ordered=True
    )  # fmt: skip

    def __init__(self, raw: Raw | None = None) -> None:
        self._given = raw
        self._raw: Raw
        self._comm: Any = None
        self._queue: Queue
        self._own: OwnReductions | None = None
        self._native: frozenset[tuple[DType, ReduceOp]] = frozenset()
        self._lock = threading.Lock()  # protects the communicator from being ended while the watchdog looks at it
        self._calling = threading.Lock()  # held during a call
        self._over = threading.Event()  # aborted or closed: an open in progress gives up
        self._failure: DdlInternalError | None = None
        self._failed_s = 0.0
        self._open_until_s = 0.0  # a deadline while the first reduction runs: the call itself may wait for a peer
        self._marks = Marks(0.0)

    # --- life

    def open(self, context: Context) -> None:
        super().open(context)
        if context.queue is None:
            raise TransportError(
                f"nccl: {self._name()} serves host memory, which NCCL does not reach; use another --backend"
            )
        self._queue = context.queue
        self._marks = Marks(float(context.settings.get("nccl_timeout_s", 0.0)))
        self._native = native(bool(context.settings.get("nccl_native_16bit", False)))
        until_s = time.monotonic() + context.timeout_s
        try:
            comm = self._join(until_s)
            with self._lock:
                self._comm = comm
            self._own = OwnReductions(self._raw, self._on, self._queue, context.rank, context.size)
            _open.add(self)
            self._open_until_s = until_s
            watch(self)
            self._try_out(until_s)
            self._open_until_s = 0.0
        except BaseException:
            self.abort()
            unwatch(self)
            raise

    def _join(self, until_s: float) -> Any:
        context, runtime = self.context, self._queue.runtime
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
        log.debug("nccl: %s meets by NCCL %s on %s", self._name(), spelled(version), runtime.device)
        name = f"ddl-{context.name}"[:64]

        def init() -> Any:
            try:
                with runtime.current():
                    return self._raw.init(context.size, unique_id, context.rank, runtime.device.index, name)
            except Exception as error:
                raise self._explained(f"opening {self._name()}", error) from error

        joining = Joining(init, self._abort_comm)
        comm = joining.wait(until_s, self._check_opening)
        if comm is None:
            raise DeadlineExceeded(f"nccl: the ranks of {self._name()} did not connect in {context.timeout_s:g} s")
        return comm

    def _unique_id(self) -> bytes:
        with self._queue.runtime.current():
            return self._raw.unique_id()

    def _try_out(self, until_s: float) -> None:
        """Run one reduction, which makes NCCL connect the GPUs.

        So if the GPUs cannot connect, ``open`` fails, and not a later step. ``until_s`` is the deadline, a time of
        time.monotonic.
        """
        one = self._queue.runtime.allocate(4)
        buffer = Buffer(one.address, 1, DType.I32, (1,), owner=one)
        self._call("connecting", lambda: self._reduced(buffer, buffer, ReduceOp.Max))
        if not Queued(self.check, self._queue.record(), "connecting").wait(max(0.0, until_s - time.monotonic())):
            raise self._unreached()

    def _unreached(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"nccl: GPUs of {self._name()} did not reach each other in {self.context.timeout_s:g} s; set "
            "NCCL_P2P_DISABLE=1 where ranks see different devices, or run it again with NCCL_DEBUG=INFO"
        )

    def close(self) -> None:
        _open.discard(self)
        unwatch(self)
        self._over.set()
        comm = self._taken()
        if comm is not None:
            whole = self._failure is None and self._drained()
            end = self._destroy_comm if whole else self._abort_comm
            if not bounded("close", lambda: end(comm), CLOSE_S):
                log.info(
                    "nccl: closing %s takes more than %g s and goes on by itself: NCCL waits until the other ranks of "
                    "this host close theirs", self._name(), CLOSE_S
                )  # fmt: skip
        if self._own is not None and not self._drained():
            _kept.append(self._own)  # the device still uses its memory
        self._own = None
        self._marks = Marks(0.0)

    def _drained(self) -> bool:
        """Wait up to CLOSE_S seconds, and return whether all queued work has run.

        NCCL can destroy the communicator normally only if all work has run.
        """
        try:
            return self._queue.record().wait(CLOSE_S)
        except DdlInternalError:
            return False

    def abort(self) -> None:
        self._fail(TransportError(f"nccl: {self._name()} was aborted here"))
        self._over.set()
        self._end(ABORT_S)

    def _end(self, wait_s: float) -> None:
        """Abort the communicator, and wait up to ``wait_s`` seconds until NCCL has done so.

        Calls of NCCL that wait on the device end without a result: the queue continues, and their memory holds garbage.
        """
        comm = self._taken()
        if comm is not None and not bounded("abort", lambda: self._abort_comm(comm), wait_s):
            log.debug("nccl: %s is still being aborted", self._name())

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
        """Forget the communicator and its memory in a forked process.

        CUDA does not work in a forked process, and the parent process owns everything that was opened.
        """
        self._lock, self._calling = threading.Lock(), threading.Lock()
        self._comm = self._own = None

    # --- collectives

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        if source.count == 0:
            return self._nothing()
        return self._begin("allreduce", lambda: self._reduced(source, target, op), source, target)

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        width, n = source.dtype.itemsize, self.context.size
        if not any(counts):
            return self._nothing()
        if counts.count(counts[0]) == n:
            return self._begin(
                "allgather",
                lambda: self._raw.all_gather(source.address, target.address, source.nbytes, BYTES, *self._on()),
                source,
                target,
            )

        def gather() -> None:
            at = target.address
            for root, count in enumerate(counts):
                if count:
                    self._raw.broadcast(source.address, at, count * width, BYTES, root, *self._on())
                at += count * width

        return self._begin("allgather", self._grouped(gather), source, target)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        if buffer.count == 0:
            return self._nothing()
        return self._begin(
            "broadcast",
            lambda: self._raw.broadcast(buffer.address, buffer.address, buffer.nbytes, BYTES, root, *self._on()),
            buffer,
        )

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        if not any(counts):
            return self._nothing()
        return self._begin("reducescatter", lambda: self._scattered(source, target, counts, op), source, target)

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        me, width = self.context.rank, source.dtype.itemsize
        sent, got = counts[me], [row[me] for row in counts]
        out, into = _starts(source.address, sent, width), _starts(target.address, got, width)

        def exchange() -> None:
            for i in range(1, self.context.size):
                to, source_rank = (me + i) % self.context.size, (me - i) % self.context.size
                if sent[to]:
                    self._raw.send(out[to], sent[to] * width, BYTES, to, *self._on())
                if got[source_rank]:
                    self._raw.recv(into[source_rank], got[source_rank] * width, BYTES, source_rank, *self._on())

        def everything() -> None:
            self._grouped(exchange)()
            if sent[me]:
                self._queue.copy(out[me], into[me], sent[me] * width)

        return self._begin("alltoall", everything, source, target)

    def barrier(self) -> Work:
        one = self._queue.runtime.allocate(4)
        buffer = Buffer(one.address, 1, DType.I32, (1,), owner=one)
        self._call("barrier", lambda: self._reduced(buffer, buffer, ReduceOp.Max))
        return Queued(self.check, self._queue.record(), "barrier", one)

    # --- how they are carried out

    def _reduced(self, source: Buffer, target: Buffer, op: ReduceOp) -> None:
        dtype = source.dtype
        if dtype is DType.BOOL:
            self._raw.all_reduce(source.address, target.address, source.count, BYTES, CARRIED[op], *self._on())
        elif (dtype, op) in self._native:
            self._raw.all_reduce(source.address, target.address, source.count, TYPES[dtype], OPS[op], *self._on())
        else:
            assert self._own is not None
            self._own.allreduce(source, target, op)

    def _scattered(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> None:
        dtype = source.dtype
        if dtype is not DType.BOOL and (dtype, op) not in self._native:
            assert self._own is not None
            self._own.reducescatterv(source, target, counts, op)
            return
        code, how = (BYTES, CARRIED[op]) if dtype is DType.BOOL else (TYPES[dtype], OPS[op])
        if counts.count(counts[0]) == len(counts):
            self._raw.reduce_scatter(source.address, target.address, counts[0], code, how, *self._on())
            return

        def scatter() -> None:
            for root, (at, count) in enumerate(zip(_starts(source.address, counts, dtype.itemsize), counts)):
                if count:
                    self._raw.reduce(at, target.address, count, code, how, root, *self._on())

        self._grouped(scatter)()

    def _on(self) -> tuple[Any, int]:
        """Return the communicator and the stream, which are the last arguments of each call of NCCL."""
        return self._comm, self._queue.handle

    def _grouped(self, calls: Callable[[], None]) -> Callable[[], None]:
        def grouped() -> None:
            self._raw.group_start()
            try:
                calls()
            finally:
                self._raw.group_end()

        return grouped

    def _begin(self, what: str, call: Callable[[], object], *buffers: Buffer) -> Work:
        dense(*buffers)
        self._call(what, call)
        if self._marks.patience_s:
            self._marks.set(self._queue.record())
        return DONE if self.capabilities.stream_ordered else Queued(self.check, self._queue.record(), what)

    def _call(self, what: str, call: Callable[[], object]) -> None:
        self.check(what)
        if self._comm is None:
            raise TransportError(f"nccl: {self._name()} is not open")
        try:
            with self._calling, self._queue.runtime.current():
                call()
        except Exception as error:
            self.check(what)  # if the communicator was aborted meanwhile, that error says more
            failure = self._explained(f"{what} on {self._name()}", error)
            self._fail(failure)
            raise failure from error

    def _nothing(self) -> Work:
        self.check("a call")
        return DONE

    # --- what goes wrong

    def check(self, what: str = "a call") -> None:
        """Raise an error if this communicator has failed or was aborted. Any thread may call this method.

        ``what`` is the name of the call that cannot be made. The name appears in the message.
        """
        if self._failure is not None:
            kind = DeadlineExceeded if isinstance(self._failure, DeadlineExceeded) else TransportError
            raise kind(f"{self._failure} (during {what})") from self._failure

    def check_queued(self) -> None:
        self.check("what is queued")

    def look(self) -> None:
        """Check the communicator for errors and deadlines. The watchdog thread calls this method every 0.1 s."""
        with self._lock:
            if self._comm is None:
                return
            try:
                state = self._raw.state(self._comm)
                account = "" if state in (SUCCESS, IN_PROGRESS) else self._raw.last_error(self._comm)
            except Exception as error:
                self._fail(self._explained(f"looking at {self._name()}", error))
                return
        if state not in (SUCCESS, IN_PROGRESS):
            self._fail(meaning(self._name(), state, account))
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
        marks = self._marks
        try:
            if marks.late():
                took = f"was not complete after {marks.patience_s:g} s (DDL_NCCL_TIMEOUT_S)"
                self._fail(TransportError(f"nccl: a bucket on {self._name()} {took}"))
        except DdlInternalError as error:  # the device itself failed
            self._fail(error)

    def _fail(self, failure: DdlInternalError) -> None:
        if self._failure is None:
            self._failed_s = time.monotonic()
            self._failure = failure

    def _check_opening(self) -> None:
        if self._over.is_set():
            raise self._failure or TransportError(f"nccl: {self._name()} was closed while it opened")

    def _explained(self, what: str, error: Exception) -> DdlInternalError:
        account = ""
        if not isinstance(error, DdlInternalError) and hasattr(self, "_raw"):
            try:
                account = self._raw.last_error(self._comm)
            except Exception as untold:  # the description is optional
                log.debug("nccl: no account of an error: %s", untold)
        return explained(what, error, account)

    def _name(self) -> str:
        context = getattr(self, "context", None)
        return f"communicator {context.name or '(unnamed)'}" if context else "the communicator"


def _starts(address: int, counts: Sequence[int], width: int) -> list[int]:
    """Return a list of the addresses at which the parts of the ranks begin.

    The first part begins at ``address``. ``counts[r]`` is the number of elements of rank r's part, and ``width`` is the
    size of an element in bytes.
    """
    return [address + before * width for before in accumulate(counts[:-1], initial=0)]


_open: weakref.WeakSet[NcclTransport] = weakref.WeakSet()
_kept: list[object] = []  # memory that the device may still use


def _after_fork() -> None:
    for transport in list(_open):
        transport.disown()


os.register_at_fork(after_in_child=_after_fork)
