"""The transport over Gloo. It chooses the fastest way to run each collective, and converts Gloo's errors to ddl's."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from ddl_gloo.direct import Direct, copy
from ddl_gloo.shim import NATIVE, GlooGroup, Pending
from ddl_gloo.store import GlooStore
from ddl_gloo.wires import Wires
from ddl_gloo.worker import Worker
from ddlcore.contracts.interfaces import chosen_address
from ddlcore.contracts.store import PrefixStore
from ddlcore.contracts.transport import DONE, Capabilities, Context, Transport, Work, dense
from ddlcore.errors import DdlInternalError, DeadlineExceeded, TransportError
from ddlcore.types import Buffer, ReduceOp

log = logging.getLogger("ddl")

LOOPBACK = "127.0.0.1"
# The calling thread itself sends and awaits messages of at most this size, because passing them to the worker thread
# takes as long as sending them. The caller cannot leave a wait in Gloo, and such a wait never ends if the connection
# was cut when the message was half received. Nevertheless this is safe, because a message of this size arrives as a
# whole.
SHORT_BYTES = 64 << 10
# Every rank sends its whole tensor to all other ranks if these messages together have at most this number of bytes.
# Between hosts the limit is lower, because the link is the bottleneck.
WHOLE_BYTES, WHOLE_BYTES_ACROSS = 768 << 10, 64 << 10
DIRECT_BARRIER = 8  # ranks; with more ranks, Gloo's barrier is faster than messages between all pairs
LATE_S = 0.3  # the time after its deadline for which ``open`` waits for Gloo's own error
SLICE_S = 0.1  # the interval at which a thread that waits for Gloo checks for an abort
CALM_S = 0.3  # the longest time for which ``abort`` waits for messages on their way
CUT_S = 0.25  # the longest wait until Gloo has closed cut connections; then Gloo no longer accesses users' memory
LEFT_S = 0.5  # the longest time for which ``close`` waits for a call that still runs


class GlooTransport(Transport):
    """A transport over TCP for 2 or more ranks on any hosts.

    It uses torch's class ProcessGroupGloo, but not torch's default process group.
    """

    capabilities = Capabilities()

    def __init__(self) -> None:
        self._lock = threading.Lock()  # abort() may come from any thread during open() and close()
        self._aborted = False
        self._group: GlooGroup | None = None
        self._direct: Direct | None = None
        self._wires: Wires | None = None
        self._worker = Worker("ddl-gloo")
        self._broken: TransportError | None = None
        self._over = threading.Event()  # set when ``abort`` has finished
        self._left: list[_Started] = []  # collectives that nobody waits for any more
        self._whole_bytes = 0

    # --- life

    def open(self, context: Context) -> None:
        super().open(context)
        if sys.platform != "linux":
            raise TransportError(f"gloo: its connections cannot be cut on {sys.platform}; use another --backend")
        hosts = {member.host for member in context.members}
        self._whole_bytes = (WHOLE_BYTES if len(hosts) == 1 else WHOLE_BYTES_ACROSS) // max(1, context.size - 1)
        address = self._address()
        until_s = time.monotonic() + context.timeout_s
        meeting = GlooStore(PrefixStore("gloo/", context.store), until_s, self._over.is_set)
        made: list[GlooGroup] = []

        def meet() -> None:
            made.append(GlooGroup(meeting, context.rank, context.size, address, context.timeout_s))

        opening = self._worker.give(meet)
        if self._aborted:
            opening.end(self._failure("open"))
        try:
            if not opening.wait(context.timeout_s + LATE_S):
                raise DeadlineExceeded("Gloo did not connect")
        except Exception as error:
            raise self._not_opened(error, address) from error
        wires = Wires(meeting.said, meeting.heard)
        if len(wires) < context.size - 1:
            log.warning("gloo: %d of %d connections found: abort may not end a call", len(wires), context.size - 1)
        with self._lock:
            self._wires, self._group = wires, made.pop()
            self._direct = Direct(self._group, context)
            _open.add(self)
        if self._aborted:
            raise self._failure("open")

    def _address(self) -> str:
        """Return the address of this host that the other ranks use to connect to this rank."""
        wanted = str(self.context.settings.get("network_interface", ""))
        if not wanted:
            return self.context.address or LOOPBACK
        try:
            return chosen_address(wanted, self.context.address)
        except ValueError as error:
            raise TransportError(f"gloo: {error}") from None

    def _not_opened(self, error: Exception, address: str) -> Exception:
        context = self.context
        if isinstance(error, DdlInternalError) and not isinstance(error, DeadlineExceeded):
            return error  # PeerLost, or the error of an abort
        if isinstance(error, DeadlineExceeded) or _is_timeout(error):
            return DeadlineExceeded(
                f"gloo: not all {context.size} ranks of {context.name or 'the communicator'} met within "
                f"{context.timeout_s:g} s; this one listens at {address} (DDL_NETWORK_INTERFACE names another interface)"
            )
        return TransportError(f"gloo: no connection from {address}: {_told(error)}")

    def close(self) -> None:
        with self._lock:
            _open.discard(self)
            self._wires = None
            group, self._group = self._group, None
            self._direct = None
        self._worker.drop(TransportError(f"gloo: {self._name()} was closed"))
        left, self._left = self._left, []
        ended = self._worker.close(LEFT_S) and all(started.ends(LEFT_S) for started in left)
        if group is not None and not ended:
            # Gloo waits forever for a message that was half sent or received when its connection ended. The group's
            # destructor waits for the end of Gloo's threads, and so would also wait forever.
            log.debug("gloo: a call on %s was left behind", self._name())
            group.leak()
            _kept.append((group, left))
        del group  # here Gloo waits for the end of its threads

    def abort(self) -> None:
        with self._lock:
            # The order of these steps matters. First, the flag stops new calls. Second, messages on their way get time
            # to arrive, because Gloo waits forever for a message that the cut has split. Third, the connections are
            # cut. Gloo's threads may still access the memory of pending calls until they have closed the connections.
            # Only after that, the callers are released, because they may free this memory. (A caller whose wait fails
            # because of the cut waits in ``broke`` for this lock.)
            self._aborted = True
            if self._wires is not None:
                self._wires.calm(CALM_S)
                self._wires.cut()
                until_s = time.monotonic() + CUT_S
                while self._wires.held() and time.monotonic() < until_s:
                    time.sleep(0.001)
            self._worker.drop(self._failure("a call"))
            self._over.set()

    def disown(self) -> None:
        """Release the group and the connections in a forked process, in which Gloo's threads do not exist.

        The parent process's connections stay open.
        """
        self._lock = threading.Lock()  # a thread of the parent process may hold the old lock
        if self._group is not None:
            self._group.leak()
        if self._wires is not None:
            self._wires.drop()
        self._group = self._direct = self._wires = None
        self._left = []
        self._worker = Worker("ddl-gloo")

    # --- collectives

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        direct = self._ready("allreduce", source, target)
        _fits("allreduce", target.count, source.count)
        if source.count == 0:
            return DONE
        if source.nbytes <= self._whole_bytes:
            return self._send("allreduce", source.nbytes, lambda: direct.allreduce_whole(source, target, op))
        if (source.dtype, op) not in NATIVE:
            shard_bytes = source.nbytes // self.context.size
            return self._send("allreduce", shard_bytes, lambda: direct.allreduce_shards(source, target, op))
        copy(source.address, target.address, source.nbytes)
        return self._start("allreduce", lambda g: g.allreduce(target, op), target)

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        direct = self._ready("allgather", source, target)
        _fits("allgather", source.count, counts[self.context.rank])
        _fits("allgather", target.count, sum(counts))
        most_bytes = max(counts) * source.dtype.itemsize
        return self._send("allgather", most_bytes, lambda: direct.allgatherv(source, target, counts))

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        direct = self._ready("broadcast", buffer)
        if buffer.count == 0:
            return DONE
        if buffer.nbytes <= self._whole_bytes:
            return self._send("broadcast", buffer.nbytes, lambda: direct.broadcast(buffer, root))
        return self._start("broadcast", lambda g: g.broadcast(buffer, root), buffer)

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        direct = self._ready("reducescatter", source, target)
        _fits("reducescatter", source.count, sum(counts))
        _fits("reducescatter", target.count, counts[self.context.rank])
        most_bytes = max(counts) * source.dtype.itemsize
        return self._send("reducescatter", most_bytes, lambda: direct.reducescatterv(source, target, counts, op))

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        direct = self._ready("alltoall", source, target)
        _fits("alltoall", source.count, sum(counts[self.context.rank]))
        _fits("alltoall", target.count, sum(row[self.context.rank] for row in counts))
        most = max(*counts[self.context.rank], *(row[self.context.rank] for row in counts))
        return self._send("alltoall", most * source.dtype.itemsize, lambda: direct.alltoallv(source, target, counts))

    def barrier(self) -> Work:
        direct = self._ready("barrier")
        if self.context.size <= DIRECT_BARRIER:
            return self._send("barrier", 1, direct.barrier)
        return self._start("barrier", GlooGroup.barrier)

    # --- how they are carried out

    def _ready(self, what: str, *buffers: Buffer) -> Direct:
        dense(*buffers)
        if self._aborted:
            raise self._failure(what)
        if self._broken is not None:
            raise self._broken
        if self._direct is None:
            raise TransportError(f"gloo: {self._name()} is not open")
        return self._direct

    def _send(self, what: str, most_bytes: int, call: Callable[[], None]) -> Work:
        """Run ``call`` on this thread if its messages are short, otherwise on the worker thread.

        ``call`` runs a collective and returns when the collective is complete. Each of its messages has at most
        ``most_bytes`` bytes. ``what`` is the name of the collective; error messages contain it.
        """

        def guarded() -> None:
            try:
                call()
            except Exception as error:
                raise self.broke(what, error) from error

        if most_bytes <= SHORT_BYTES and self._worker.idle:
            guarded()
            return DONE
        task = self._worker.give(guarded)
        if self._aborted:  # ``abort`` may have run before ``give``, so that it did not end the task
            task.end(self._failure(what))
        return task

    def _start(self, what: str, call: Callable[[GlooGroup], Pending], memory: Buffer | None = None) -> Work:
        """Start a collective that runs in a thread of Gloo, and return its Work.

        ``call`` starts the collective, and ``memory`` is the memory that the collective reads or writes. ``what`` is
        the name of the collective; error messages contain it.
        """
        assert self._group is not None
        try:
            return _Started(self, what, call(self._group), memory)
        except Exception as error:
            raise self.broke(what, error) from error

    def check(self, started: _Started, what: str) -> None:
        """Raise TransportError if the transport was aborted while the collective ``started`` was in flight.

        After an abort, the collective may never end. ``what`` is the name of the collective; the error message contains
        it.
        """
        if self._over.is_set():
            self._left.append(started)
            raise self._failure(what)

    def broke(self, what: str, error: Exception) -> TransportError:
        """Cut all connections after Gloo has raised ``error``, and return the TransportError that the caller raises.

        After this error, no call can succeed on any rank. The cut informs the other ranks. ``what`` is the name of the
        collective; the error message contains it.
        """
        if self._broken is None:
            self._broken = TransportError(f"gloo: {what} on {self._name()} failed: {_told(error)}")
        with self._lock:
            if self._wires is not None:
                self._wires.cut()
        return self._failure(what) if self._aborted else self._broken

    def _failure(self, what: str) -> TransportError:
        return TransportError(f"gloo: {self._name()} was aborted here during {what}")

    def _name(self) -> str:
        context = getattr(self, "context", None)
        return f"communicator {context.name or '(unnamed)'}" if context else "the communicator"


class _Started(Work):
    """A collective in flight in a thread of Gloo. Gloo's errors are converted to errors of ddl."""

    __slots__ = ("_memory", "_pending", "_transport", "_what")

    def __init__(self, transport: GlooTransport, what: str, pending: Pending, memory: Buffer | None) -> None:
        self._memory = memory  # keeps the memory alive: Gloo knows only the address
        self._transport = transport
        self._what = what
        self._pending = pending

    def wait(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = until_s - time.monotonic()
            try:
                if self._pending.wait(min(left_s, SLICE_S)):
                    return True
            except Exception as error:
                raise self._transport.broke(self._what, error) from error
            self._transport.check(self, self._what)
            if left_s <= SLICE_S:
                return False

    def ends(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds, and return whether the collective has ended (succeeded or failed)."""
        try:
            return self._pending.wait(timeout_s)
        except RuntimeError:
            return True


def _fits(what: str, count: int, expected: int) -> None:
    """Raise ValueError if ``count`` differs from ``expected``.

    Without this check, Gloo would not raise an error, but kill the ranks whose sizes differ.
    """
    if count != expected:
        raise ValueError(f"gloo: {what} of {count} elements where {expected} are told; please report this")


def _told(error: BaseException) -> str:
    """Return the first line of Gloo's message in ``error``, without the source position and without Gloo's advice."""
    first = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().partition("\n")[0])
    return first.partition(". This is typically")[0] or type(error).__name__


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and bool(re.search("time[d ]*out", str(error), re.IGNORECASE))


_open: weakref.WeakSet[GlooTransport] = weakref.WeakSet()
_kept: list[object] = []  # objects whose memory Gloo may still access


def _after_fork() -> None:
    for transport in list(_open):
        transport.disown()


os.register_at_fork(after_in_child=_after_fork)
