"""Send and receive bytes over one encrypted connection of a rank to its launcher, and notice a lost launcher."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import sys
import time

import zmq

from ddlcore.control.credentials import Access
from ddlcore.control.liveness import open_pidfd
from ddlcore.control.wake import Wake
from ddlcore.errors import Closed, DdlInternalError
from ddlcore.reentry import Lock

FLUSHED = b""  # a client's last frame. When the server sends this frame back, all earlier frames have arrived
# TCP only: within a host, the kernel reports a closed connection at once. The kernel's keepalive finds a host that is
# gone, and needs no thread of either process. ZeroMQ's heartbeats find a process that is stopped. The heartbeats pass
# through Python threads in the coordinator's process. These threads cannot run while another thread has the interpreter
# lock, for example while that thread loads a large library. So the heartbeats need a longer timeout: a few seconds were
# too few where rank 0 imported a framework.
KEEPALIVE_S = 1  # between two probes, and from the last data to the first probe
KEEPALIVE_PROBES = 3  # a connection ends after so many probes without an answer
# The kernel ends a connection if sent data was not acknowledged for so long. Data that must wait because the receiver
# has not read the earlier data counts as not acknowledged, too. A thread of libzmq reads for a rank, but the Python
# threads mentioned above read for the coordinator. A rank may have sent the names of thousands of tensors. So the
# timeout for data from a rank to the coordinator (UNREAD_MS) is longer than for the other direction (UNANSWERED_MS).
UNANSWERED_MS = 4_000
UNREAD_MS = 12_000
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000  # after a ping

LAUNCHER = "the launcher"
_FLUSH_S = 0.2
_ENDING_MS = 100  # time from the end of a process's connections to the end of the process
BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_TRANSIENT = (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_MOST_REFUSALS = 10


class Connection:
    """The resources that all sockets of one rank share: the keys, a ZeroMQ context and the pidfd of the launcher.

    Each user of a Connection calls ``retain`` first and ``release`` last. The last ``release`` closes the context and
    the pidfd. A process with many ranks may pass the same ``context`` to the Connections of all these ranks; the caller
    must then terminate this context. ``peer`` names the process at the other end in error messages.
    """

    def __init__(
        self,
        access: Access,
        rank: int,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        peer: str = LAUNCHER,
    ) -> None:
        self.access = access
        self.peer = peer
        self.rank = rank
        self.pid = os.getpid()
        self.launcher = _watch(access, peer)
        self._shared = context is not None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1) if context is None else context
        self._lock = Lock()
        self._users = 0

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of the process that connected. A child must not use the sockets."""
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
                self.context.term()  # does not block, since no socket is left
            if self.launcher >= 0:
                os.close(self.launcher)


def _watch(access: Access, peer: str) -> int:
    if not access.endpoint.startswith("ipc:"):  # the launcher may be on another host
        return -1
    try:
        return open_pidfd(access.launcher_pid)
    except ProcessLookupError:
        raise DdlInternalError(f"{peer} is gone: there is no process {access.launcher_pid} any more") from None


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]], access: Access, name: bytes, *, beats: bool = True
) -> zmq.Socket[bytes]:
    """Return a DEALER socket with the routing id ``name`` and the keys of ``access``. The caller must connect it.

    If ``beats`` is true and the endpoint is a TCP endpoint, ZeroMQ will send heartbeats on the connection, and the
    kernel will send keepalive probes.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.curve_serverkey = access.server_public.encode()
    socket.curve_publickey = access.client_public.encode()
    socket.curve_secretkey = access.client_secret.encode()
    if access.endpoint.startswith("tcp:"):
        if beats:
            keep_alive(socket)
        socket.setsockopt(zmq.IPV6, 1 if "[" in access.endpoint else 0)
    return socket


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Let a TCP connection of ``socket`` end soon after the other host is gone or the other process was stopped."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S),
        (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S),
        (zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES),
        (zmq.TCP_MAXRT, UNREAD_MS),
    ):
        with contextlib.suppress(zmq.ZMQError):  # a system without this option has only the heartbeats
            socket.setsockopt(option, value)


class Refusals:
    """Decides whether the end of a TCP connection is final, or must be ignored because ZeroMQ connects again.

    While many clients connect at once, a server may close a connection before the client has shown its key. ZeroMQ then
    connects again by itself, and keeps the client's messages until the server has admitted the client.
    """

    def __init__(self, endpoint: str) -> None:
        self._left = _MOST_REFUSALS if endpoint.startswith("tcp:") else 0

    def heard(self) -> None:
        """Record that the server has admitted this connection. From now on, the end of the connection is final."""
        self._left = 0

    def forgive(self, event: int) -> bool:
        """Return True if the caller must ignore ``event``, an event that the socket's monitor has reported.

        An event is ignored if ZeroMQ connects again after it, but at most 10 events are ignored.
        """
        if event not in _TRANSIENT or self._left <= 0:
            return False
        self._left -= 1
        return True


class Line:
    """One connection to the launcher, by a DEALER socket. Only one thread at a time may use it.

    ``kind`` is "c" for a connection to the coordinator, and "s" for a connection to the store. If ``wake`` is given,
    setting this event interrupts ``receive``. In a forked child, ``close`` does nothing and the other methods raise
    DdlInternalError.
    """

    def __init__(self, connection: Connection, kind: str, wake: Wake | None = None) -> None:
        self._connection = connection.retain()
        self._wake = wake
        self._sent = False
        self.broken = ""  # reason why nothing more can arrive; "": not broken
        access, context = connection.access, connection.context
        # Each connection has a different name, because a router ignores a second connection with a name that is in use.
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
        """Add ``data`` to the messages that libzmq sends in the background. Never blocks."""
        self._check()
        self._sent = True
        self._socket.send(data, zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> list[bytes]:
        """Wait at most ``timeout_s`` for a message, and return all messages that have arrived.

        Returns [] after the timeout, or if the event ``wake`` was set. Raises DdlInternalError if the launcher is gone
        and earlier calls have returned all its messages.
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
        """Wait at most ``timeout_s`` for any input, and handle all input except messages.

        Input is a message, an event of the socket's monitor, the end of the launcher's process, or the event ``wake``.
        Returns False if only events of the socket's monitor have arrived. The caller must then wait again, unless
        ``broken`` is set. Returns True in all other cases, including the timeout.
        """
        sources = self._poller.poll(max(math.ceil(timeout_s * 1000), 0))
        for source, _ in sources:
            if source is self._events:
                self._read_events()
            elif source == self._connection.launcher:
                self.broken = f"{self._connection.peer} is gone: its process has ended"
            elif source is not self._socket and self._wake is not None:
                self._wake.clear()
        return [source for source, _ in sources] != [self._events]

    def close(self) -> None:
        """Wait until the launcher has received all sent messages, but at most 200 ms; then close the socket.

        Further calls do nothing. In a forked child, every call does nothing.
        """
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
        elif event == zmq.EVENT_DISCONNECTED and self._launcher_ended():
            self.broken = f"{self._connection.peer} is gone: its process has ended"
        elif event == zmq.EVENT_DISCONNECTED:
            self.broken = f"{self._connection.peer} is gone: the connection to it at {where.decode()} has ended"
        else:
            self.broken = (
                f"{self._connection.peer} at {where.decode()} does not admit this rank: its job has other keys"
            )

    def _launcher_ended(self) -> bool:
        """Return whether the kernel reports, within 100 ms, that the process at the other end has ended.

        The kernel closes the connections of a process shortly before the kernel reports the end of that process. Return
        False if the other process cannot be watched, for example because it is on another host.
        """
        if self._connection.launcher < 0:
            return False
        poll = select.poll()
        poll.register(self._connection.launcher, select.POLLIN)
        return bool(poll.poll(_ENDING_MS))

    def _check(self) -> None:
        if self._connection.foreign:
            raise DdlInternalError(
                f"this process was forked from rank {self._connection.rank} (process {self._connection.pid}) and is "
                "no rank of the job; call ddl in the rank's own process"
            )
        if self._socket.closed:
            raise Closed(f"the control network of rank {self._connection.rank} is closed")
