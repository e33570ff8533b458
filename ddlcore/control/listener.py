"""Admit clients that have a key of the job to the control network, and move message frames without reading them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
from collections import deque

import msgspec
import zmq
from zmq.utils import z85

from ddlcore.control.credentials import Access, KeyPair
from ddlcore.control.line import FLUSHED, keep_alive
from ddlcore.control.listening import OwnSocket, tcp_listener, tcp_name
from ddlcore.control.proxy import TcpProxy
from ddlcore.errors import DdlInternalError

_LINGER_MS = 1000  # time for the last messages to clients that are connected when it closes
_LARGEST_BYTES = 64 << 20  # a client that announces more is disconnected; real messages are far smaller
_ABSTRACT = sys.platform == "linux"  # Unix sockets may have a name that is no file
_IPC_FILTER_UID = 59  # ZMQ_IPC_FILTER_UID: users who may connect to a Unix socket; pyzmq lacks the constant


class Listener:
    """A ROUTER socket of ZeroMQ, with the authenticator that decides which clients the ROUTER admits.

    One thread creates and binds the listener; after that, one other thread uses it. Any thread may call ``admit``. If
    ``parts`` is set, ``parted`` returns the connections that have ended without a goodbye, that is, without the frame
    ``FLUSHED`` as the client's last message.

    A flood of connections to the ROUTER could use up the file descriptors of the process, and libzmq then aborts the
    process. In addition, libzmq reserves as much memory as a client announces. Therefore processes of other users must
    show a key before they reach the ROUTER: Unix sockets are open to this user only, and TCP connections go through a
    ``TcpProxy``.
    """

    def __init__(self, *, parts: bool = False, keys: KeyPair | None = None) -> None:
        keys, clients = keys or KeyPair(), KeyPair()
        self._access = Access("ipc://nowhere", os.getpid(), keys.public, clients.public, clients.secret)
        self._admitted = {z85.decode(clients.public)}
        self._directory = ""
        self._own: list[OwnSocket] = []
        self._proxies: list[TcpProxy] = []
        self._parts = parts
        self._names: dict[int, bytes] = {}  # by descriptor: name of the connection
        self._parted: deque[bytes] = deque()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._authenticator = self.context.socket(zmq.REP)
        self._authenticator.linger = 0
        self._authenticator.bind("inproc://zeromq.zap.01")
        self._router = self._open_router(keys)
        if parts:
            self._router.monitor("inproc://ddl-parted", zmq.EVENT_DISCONNECTED)
            self._events = self.context.socket(zmq.PAIR)
            self._events.linger = 0
            self._events.connect("inproc://ddl-parted")

    def _open_router(self, keys: KeyPair) -> zmq.Socket[bytes]:
        router = self.context.socket(zmq.ROUTER)
        router.curve_server = True
        router.setsockopt(zmq.ZAP_DOMAIN, b"ddl")
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator libzmq admits nobody, not everybody
        router.curve_secretkey = keys.secret.encode()
        router.sndhwm = router.rcvhwm = 0  # a rank that does not read its messages must not block the others
        router.linger = _LINGER_MS
        router.setsockopt(zmq.BACKLOG, 4096)
        router.setsockopt(zmq.MAXMSGSIZE, _LARGEST_BYTES)
        for uid in {os.geteuid(), 0}:
            with contextlib.suppress(zmq.ZMQError):  # libzmq without it: only directories and keys keep others out
                router.setsockopt(_IPC_FILTER_UID, *struct.unpack("=i", struct.pack("=I", uid)))
        return router

    # --- opening and closing

    def bind_within(self, *, by_name: bool = False) -> str:
        """Listen at an ipc socket for processes of this host, and return its endpoint. The socket leaves no file.

        If ``by_name`` is false, only processes that see this process in their /proc can connect. If ``by_name`` is
        true, processes that do not see it, such as processes in other containers, can connect too. Processes of other
        users can then connect as well, but are disconnected at once.
        """
        own = "" if by_name else self._bind_own()
        if own:
            return own
        if _ABSTRACT:
            return self._bind(f"ipc://@ddl-{secrets.token_hex(16)}")  # abstract: no file, gone with this process
        self._directory = tempfile.mkdtemp(prefix="ddl-")  # 0700
        return self._bind(f"ipc://{self._directory}/control")

    def bind(self, address: str, *, beats: bool = True, connections: int = 0) -> str:
        """Listen at ``address`` and return the endpoint. If the port in ``address`` is 0, the system chooses the port.

        ``address`` is ``tcp://IP:PORT`` or an ipc address. If ``beats`` is true, the listener ends TCP connections to
        hosts that are gone and to processes that are stopped. ``connections`` is the number of TCP connections that the
        job itself may open at the same time. Raises ValueError if ``address`` is malformed or if this host does not
        have it, and DdlInternalError if it is in use.
        """
        if not address.startswith(("tcp:", "ipc:")):
            raise ValueError(f"control network: {address!r} is neither tcp://IP:PORT nor an ipc address")
        if address.startswith("ipc:"):
            endpoint = self._bind(address)
            if not endpoint.startswith("ipc://@"):
                os.chmod(endpoint.removeprefix("ipc://"), 0o600)
            return endpoint
        try:
            listener = tcp_listener(address)
        except (OSError, ValueError) as error:
            raise _no_listener(address, error) from None
        return self.bind_to(listener, beats=beats, connections=connections)

    def bind_to(self, listener: socket.socket, *, beats: bool = True, connections: int = 0) -> str:
        """Take over ``listener``, a TCP socket that listens already, and return its endpoint. See ``bind``."""
        try:
            if beats:
                keep_alive(self._router)  # for the heartbeats: the proxy, which has the TCP connections, does the rest
            target = self.bind_within().removeprefix("ipc://")
            endpoint = tcp_name(listener)
            target = "\0" + target[1:] if target.startswith("@") else target
            self._proxies.append(TcpProxy(listener, target, connections, keeps_alive=beats))
        except BaseException:
            listener.close()
            raise
        return endpoint

    def _bind_own(self) -> str:
        """Listen at a Unix socket that no other user can reach, and return the endpoint.

        Returns an empty string if the system does not support such a socket.
        """
        try:
            own = OwnSocket()
        except OSError:
            return ""
        self._own.append(own)
        endpoint = f"ipc://{own.path}"
        listening = socket.socket.detach(own.socket)  # libzmq owns it from now on
        self._router.setsockopt(zmq.USE_FD, listening)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            os.close(listening)
            raise _no_listener(endpoint, error) from None
        finally:
            self._router.setsockopt(zmq.USE_FD, -1)
        return endpoint

    def _bind(self, address: str) -> str:
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            raise _no_listener(address, error) from None
        bound = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()

    def close_sockets(self) -> None:
        """Close the ROUTER, its monitor and the authenticator. May be called again.

        The ROUTER must be closed together with the authenticator: while the ROUTER waits for an answer of the
        authenticator about a client, it does not release the connection of this client.
        """
        if self._parts and not self._router.closed:
            self._router.disable_monitor()
            self._events.close()
        self._router.close()
        self._authenticator.close()

    def release(self) -> None:
        """Close all sockets, the ZeroMQ context and the proxies. The thread that used this listener must have ended."""
        self.close_sockets()
        self.context.term()
        for proxy in self._proxies:  # the proxy has received the last messages by now
            proxy.close()
        for own in self._own:
            own.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = ""

    # --- serving

    @property
    def refused(self) -> int:
        """The number of TCP connections that were ended because they had shown no key. Any thread may read this."""
        return sum(proxy.refused for proxy in self._proxies)

    def access(self, endpoint: str) -> Access:
        """Return the keys and the endpoint with which a client connects to this listener at ``endpoint``."""
        return msgspec.structs.replace(self._access, endpoint=endpoint)

    def admit(self, public: str) -> None:
        """From now on, also admit clients with the public key ``public`` (Z85). Any thread may call this."""
        self._admitted.add(z85.decode(public))

    def register(self, poller: zmq.Poller) -> None:
        """Register all sockets of this listener with ``poller``.

        The poller then wakes when input for ``let_in``, ``receive`` or ``parted`` has arrived.
        """
        for source in (self._router, self._authenticator, *([self._events] if self._parts else [])):
            poller.register(source, zmq.POLLIN)

    def let_in(self) -> None:
        """Answer the ROUTER's requests to authenticate clients: admit clients with an admitted key, refuse all others.

        The requests follow the ZAP protocol (ZeroMQ RFC 27). This method also records which connections have ended, for
        ``parted``. Call it first in each turn of the thread's loop, before ``receive``.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                version, request, _domain, _address, _name, *credentials = self._authenticator.recv_multipart(
                    zmq.NOBLOCK
                )
                known = len(credentials) == 2 and credentials[0] == b"CURVE" and credentials[1] in self._admitted
                code, text = (b"200", b"OK") if known else (b"400", b"no key of this job")
                self._authenticator.send_multipart([version, request, code, text, b"", b""])
        if self._parts:
            self._note_parted()

    def receive(self) -> list[bytes]:
        """Return the frames of one message, without waiting. The first frame is the name of the connection.

        Raises zmq.Again if no message has arrived.
        """
        if not self._parts:
            return self._router.recv_multipart(zmq.NOBLOCK)
        frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        data = [frame.bytes for frame in frames]
        fd = frames[-1].get(zmq.SRCFD)
        if isinstance(fd, int) and fd >= 0:
            if data[-1] == FLUSHED:
                self._names.pop(fd, None)  # the goodbye of this connection
            else:
                self._names[fd] = data[0]
        return data

    def parted(self) -> list[bytes]:
        """Return the names of the connections that have ended without a goodbye since the last call of this method.

        A goodbye is the frame ``FLUSHED`` as the client's last message. Call this method after ``receive`` has returned
        all messages that have arrived.
        """
        names = list(self._parted)
        self._parted.clear()
        return names

    def send(self, frames: list[bytes]) -> None:
        """Send a message without blocking. The first of ``frames`` is the name of the connection to send it on.

        A message for a connection that has ended is dropped.
        """
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._router.send_multipart(frames, zmq.NOBLOCK)

    def _note_parted(self) -> None:
        # This must happen before messages are read, because a new connection may have the same descriptor as an ended
        # connection. The new connection cannot have sent a message yet: only ``let_in``, in this thread, admits it.
        with contextlib.suppress(zmq.Again):
            while True:
                head, _ = self._events.recv_multipart(zmq.NOBLOCK)
                name = self._names.pop(int.from_bytes(head[2:6], sys.byteorder), None)
                if name is not None:
                    self._parted.append(name)


def _no_listener(address: str, error: Exception) -> Exception:
    number = error.errno if isinstance(error, (OSError, zmq.ZMQError)) else 0
    if number == errno.EADDRINUSE:
        return DdlInternalError(f"control network: {address} is in use; choose another port, or 0 for any free one")
    why = getattr(error, "strerror", None) or str(error)
    return ValueError(f"control network: cannot listen at {address!r}: {why}")
