"""One encrypted connection of a rank to its launcher: moves bytes and notices that the other end is gone."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import sys
import threading
import time

import zmq

from ddlcore.control.credentials import Access
from ddlcore.control.liveness import open_pidfd
from ddlcore.control.wake import Wake
from ddlcore.errors import Closed, DdlInternalError

__all__ = [
    "BROKEN",
    "FLUSHED",
    "HEARTBEAT_MS",
    "HEARTBEAT_TIMEOUT_MS",
    "Connection",
    "Line",
    "Refusals",
    "open_dealer",
]

FLUSHED = b""  # sent as the last frame of a line and sent back by the server: all before it has arrived
HEARTBEAT_MS = 1000  # tcp only: inside a host the kernel tells at once
HEARTBEAT_TIMEOUT_MS = 2500  # after a ping: silence of about 3 s ends a connection

_FLUSH_S = 0.2
BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_TRANSIENT = (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_MOST_REFUSALS = 10


class Connection:
    """What the lines of one rank share: keys, one ZeroMQ context and the launcher's pidfd; the last user ends it.

    ``context``: one that many connections share, where a process speaks for many ranks; its owner ends it.
    """

    def __init__(self, access: Access, rank: int, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.access = access
        self.rank = rank
        self.pid = os.getpid()
        self.launcher = _watch(access)
        self._shared = context is not None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1) if context is None else context
        self._lock = threading.Lock()
        self._users = 0

    @property
    def foreign(self) -> bool:
        """This process was forked from the one that connected; the sockets are not its own."""
        return os.getpid() != self.pid

    def retain(self) -> Connection:
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            if not self._shared:
                self.context.term()  # no socket is left, so it does not wait
            if self.launcher >= 0:
                os.close(self.launcher)


def _watch(access: Access) -> int:
    if not access.endpoint.startswith("ipc:"):  # the launcher may be on another host
        return -1
    try:
        return open_pidfd(access.launcher_pid)
    except ProcessLookupError:
        raise DdlInternalError(f"the launcher is gone: there is no process {access.launcher_pid} any more") from None


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]], access: Access, name: bytes, *, beats: bool = True
) -> zmq.Socket[bytes]:
    """A socket under ``name`` with the keys of ``access``, not yet connected. ``beats``: ZeroMQ's own, over TCP."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.curve_serverkey = access.server_public.encode()
    socket.curve_publickey = access.client_public.encode()
    socket.curve_secretkey = access.client_secret.encode()
    if access.endpoint.startswith("tcp:"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS if beats else 0)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.IPV6, 1 if "[" in access.endpoint else 0)
    return socket


class Refusals:
    """Tells whether a TCP connection that ended is to be tried again, as ZeroMQ does by itself, or is broken for good.

    A server that many strangers connect to at the same time may end a connection before that has shown its key. What
    was sent on it is kept until one is let in.
    """

    def __init__(self, endpoint: str) -> None:
        self._left = _MOST_REFUSALS if endpoint.startswith("tcp:") else 0

    def heard(self) -> None:
        """The server has let us in: the next end is the last."""
        self._left = 0

    def forgive(self, event: int) -> bool:
        """Whether ``event`` of the socket's monitor means nothing yet."""
        if event not in _TRANSIENT or self._left <= 0:
            return False
        self._left -= 1
        return True


class Line:
    """One DEALER socket. One thread at a time; not usable in forked children, whose calls raise or do nothing."""

    def __init__(self, connection: Connection, kind: str, wake: Wake | None = None) -> None:
        self._connection = connection.retain()
        self._wake = wake
        self._sent = False
        self.broken = ""  # why nothing will ever arrive again
        access, context = connection.access, connection.context
        # A name of its own for each connection: a router ignores a second one under a name still in use.
        name = f"{kind}{connection.rank}.{secrets.token_hex(4)}"
        self._socket = open_dealer(context, access, name.encode())
        self._refusals = Refusals(access.endpoint)
        self._socket.monitor(f"inproc://{name}", BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._events.linger = 0
        self._events.connect(f"inproc://{name}")
        self._socket.connect(access.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)
        if connection.launcher >= 0:
            self._poller.register(connection.launcher, zmq.POLLIN)
        if wake is not None:
            self._poller.register(wake.fileno(), zmq.POLLIN)

    def send(self, data: bytes) -> None:
        """Queues ``data``; never waits."""
        self._check()
        self._sent = True
        self._socket.send(data, zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> list[bytes]:
        """All that has arrived, after at most ``timeout_s``; [] at the timeout or when woken.

        Raises DdlInternalError when the launcher is gone and all it had sent was returned.
        """
        self._check()
        deadline_s = time.monotonic() + timeout_s
        while not self.broken and not self._poll(deadline_s - time.monotonic()):
            pass
        arrived = self._drain()
        if self.broken and not arrived:
            raise DdlInternalError(self.broken)
        return arrived

    def _poll(self, timeout_s: float) -> bool:
        """Whether there was more than events that mean nothing."""
        sources = self._poller.poll(max(math.ceil(timeout_s * 1000), 0))
        for source, _ in sources:
            if source is self._events:
                self._read_events()
            elif source == self._connection.launcher:
                self.broken = "the launcher is gone: its process has ended"
            elif source is not self._socket and self._wake is not None:
                self._wake.clear()
        return [source for source, _ in sources] != [self._events]

    def close(self) -> None:
        """Waits up to 200 ms until what was sent has arrived. May be repeated; does nothing in a forked child."""
        if self._connection.foreign or self._socket.closed:
            return
        if self._sent and not self.broken:
            with contextlib.suppress(DdlInternalError, zmq.ZMQError):
                self._flush()
        self._socket.disable_monitor()
        self._events.close()
        self._socket.close()
        self._connection.release()

    def _flush(self) -> None:
        self.send(FLUSHED)
        deadline_s = time.monotonic() + _FLUSH_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            if FLUSHED in self.receive(left_s):
                return

    def _drain(self) -> list[bytes]:
        arrived = []
        with contextlib.suppress(zmq.Again):
            while True:
                arrived.append(self._socket.recv(zmq.NOBLOCK))
        return arrived

    def _read_events(self) -> None:
        head, where = self._events.recv_multipart()
        event = int.from_bytes(head[:2], sys.byteorder)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._refusals.heard()
        elif self._refusals.forgive(event):
            return
        elif event == zmq.EVENT_DISCONNECTED:
            self.broken = f"the launcher is gone: it has closed the control network at {where.decode()}"
        else:
            self.broken = f"the launcher at {where.decode()} does not admit this rank: its job has other keys"

    def _check(self) -> None:
        if self._connection.foreign:
            raise DdlInternalError(
                f"this process was forked from rank {self._connection.rank} (process {self._connection.pid}) and is "
                "no rank of the job; call ddl in the rank's own process"
            )
        if self._socket.closed:
            raise Closed(f"the control network of rank {self._connection.rank} is closed")
