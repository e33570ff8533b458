"""Forward the control network's TCP connections, and limit the number of connections that have not shown a key.

Without this proxy, libzmq would accept every connection and read all data that the client announces. libzmq aborts the
process when the process has no file descriptors left. Therefore libzmq listens at a Unix socket that only this user can
reach. For each TCP connection whose first bytes are those of ZeroMQ's protocol, the proxy opens a connection to that
socket. The proxy has no key itself. It recognizes by the answers of libzmq whether a client is authenticated: libzmq
sends WELCOME to a client that knows the server's key, and READY to a client that also has a key of the job.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from ddlcore.control.line import KEEPALIVE_PROBES, KEEPALIVE_S, UNANSWERED_MS
from ddlcore.control.peers import is_ours, local_tcp_uid
from ddlcore.control.wake import Wake
from ddlcore.threads import OwnThread

HANDSHAKE_S = 5.0  # time for a connection to show that it knows the server's key
_KEY_S = 30.0  # time to show a client key after that: the authenticating thread may be busy
_STRANGERS = 16  # connections of other users of this host, at one time, that have shown no key
_EXTRA = 64  # connections of all others without a key, in addition to those of the job's own ranks
_FEWEST = 16
_FILES_EACH = 3  # the TCP connection, and both ends of its connection to libzmq
_FILES_SPARE = 64  # files that the process may open meanwhile for other purposes
_HANDSHAKE_BYTES = 2048  # a real handshake has about 800
_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f"  # first bytes of ZeroMQ's protocol since its version 2; constant in our case
_WELCOME_AT, _WELCOME = 64, b"\x04\xa8\x07WELCOME"  # follows the greeting in libzmq's answer
_READY_AT, _READY = 64 + 170 + 2, b"\x05READY"  # follows WELCOME and the head of its own frame
_READ_BYTES = 1 << 18
_ACCEPT_AT_ONCE = 64
_PAUSE_S = 0.05
_TICK_S = 0.5
_DRAIN_S = 0.3  # time at the end for the last messages of libzmq


@dataclass(eq=False)
class _Pair:
    """A TCP connection of a client, and the connection to libzmq to which its data is forwarded.

    The connection to libzmq is opened when the first bytes of the TCP connection have proved valid.
    """

    outer: socket.socket
    book: OrderedDict[_Pair, None]  # the list that has this pair until it has shown a key, oldest first
    deadline_s: float
    inner: socket.socket | None = None
    known: bool = False  # libzmq has sent WELCOME
    prolonged: bool = False  # the deadline was extended, because ``known`` is true
    ready: bool = False  # the client is authenticated
    shown: int = 0  # number of bytes that the client has sent before it was authenticated
    begun: bytes = b""  # first bytes of the client, as long as they are too few to judge
    answered: bytearray = field(default_factory=bytearray)
    waiting: dict[socket.socket, memoryview] = field(default_factory=dict)  # by socket: data that it must still accept
    ended: bool = False


class TcpProxy:
    """A thread that accepts connections at ``listener`` and connects each of them to ``target``, a Unix socket.

    One thread creates the proxy, and one thread (the same or another) closes the proxy. ``expected`` is the number of
    connections that the job's own ranks and agents may open at the same time. If ``keeps_alive`` is true, the kernel
    ends a connection when the host at its other end is gone. If it is false, the job finds this out by its own
    heartbeats.
    """

    def __init__(self, listener: socket.socket, target: str, expected: int, *, keeps_alive: bool = False) -> None:
        self.refused = 0  # connections that were ended because they had shown no key
        self._listener = listener
        self._target = target
        self._pid = os.getpid()
        self._strangers: OrderedDict[_Pair, None] = OrderedDict()
        self._others: OrderedDict[_Pair, None] = OrderedDict()
        self._expected = expected
        self._keeps_alive = keeps_alive
        self._most = self._room()
        self._pairs: set[_Pair] = set()
        self._paused_s = 0.0
        self._stopping = False
        self._wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake.fileno(), selectors.EVENT_READ)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = OwnThread(target=self._run, name="ddl-tcp")
        self._thread.start()

    def close(self) -> None:
        """Forward data until libzmq has closed all its connections, but at most for 0.3 s; then close all connections.

        Further calls do nothing. In a forked child, every call does nothing.
        """
        if os.getpid() != self._pid or self._stopping:
            return
        self._stopping = True
        self._wake.set()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._wake.close()

    def _room(self) -> int:
        """Return how many connections that have not shown a key may exist at the same time.

        The number leaves enough file descriptors for the connections that have shown a key.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return self._expected + _EXTRA
        left = (limit - _FILES_SPARE) // _FILES_EACH - self._expected - _STRANGERS
        return max(min(left, self._expected + _EXTRA), _FEWEST)

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn(_TICK_S)
            self._stop_accepting()
            deadline_s = time.monotonic() + _DRAIN_S
            while any(pair.inner is not None for pair in self._pairs) and time.monotonic() < deadline_s:
                self._turn(0.02)
        finally:
            self._stop_accepting()
            for pair in list(self._pairs):
                self._end(pair)
            self._selector.close()

    def _turn(self, patience_s: float) -> None:
        for key, mask in self._selector.select(patience_s):
            if key.data is None:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._wake.clear()
                continue
            pair: _Pair = key.data
            try:
                if mask & selectors.EVENT_WRITE and not pair.ended:
                    self._flush(pair, key.fileobj)  # type: ignore[arg-type]  # only sockets are registered with data
                if mask & selectors.EVENT_READ and not pair.ended:
                    self._read(pair, key.fileobj)  # type: ignore[arg-type]  # as above
            except OSError:  # the peer has closed the connection
                self._end(pair)
        self._expire(time.monotonic())

    def _stop_accepting(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()

    # --- connections without a key

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                outer, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room()
                    return
                continue  # the peer has already closed the connection
            self._admit(outer)

    def _admit(self, outer: socket.socket) -> None:
        # libzmq must never see a flood of connections, because libzmq aborts when no descriptors are left. So
        # connections without a key are counted before they reach libzmq, in two lists (books). Other users of this host
        # have a small list of their own, so that they cannot fill the list for the job's ranks. When a list is full, an
        # old connection is ended and the new connection is accepted. If the new connection were refused instead, a
        # flood of silent connections would keep the ranks out until the flood ends. A rank authenticates within
        # milliseconds, so the connection of a rank is seldom ended.
        uid = local_tcp_uid(outer)
        stranger = uid >= 0 and not is_ours(uid)
        book, most = (self._strangers, _STRANGERS) if stranger else (self._others, self._most)
        while len(book) >= most:
            self._refuse(_worst(book))
        pair = _Pair(outer, book, time.monotonic() + HANDSHAKE_S)
        outer.setblocking(False)
        with contextlib.suppress(OSError):
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._keeps_alive:
            _keep_alive(outer)
        book[pair] = None
        self._pairs.add(pair)
        self._selector.register(outer, selectors.EVENT_READ, pair)

    def _make_room(self) -> None:
        """Free a file descriptor, because the process has none left: end an old connection that has shown no key.

        If there is no such connection, accept no connections for the next 0.05 s.
        """
        book = self._strangers or self._others
        if book:
            self._refuse(_worst(book))
            return
        self._selector.unregister(self._listener)
        self._paused_s = time.monotonic() + _PAUSE_S

    def _refuse(self, pair: _Pair) -> None:
        self.refused += 1
        self._end(pair)

    def _expire(self, now_s: float) -> None:
        for book in (self._strangers, self._others):
            while book and (oldest := next(iter(book))).deadline_s <= now_s:
                if oldest.known and not oldest.prolonged:
                    oldest.prolonged = True
                    oldest.deadline_s = now_s + _KEY_S
                    book.move_to_end(oldest)
                else:
                    self._refuse(oldest)
        if self._paused_s and now_s >= self._paused_s and not self._stopping:
            self._paused_s = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _check(self, pair: _Pair, data: bytes) -> bytes:
        """Check ``data``, which a client has sent before its authentication, and return the bytes to forward to libzmq.

        Return b"" as long as too few bytes have arrived. Open the connection to libzmq when the first bytes are
        complete. End the client's connection if the first bytes are not those of ZeroMQ's protocol, or if the client
        has sent more bytes than a handshake needs.
        """
        pair.shown += len(data)
        if pair.shown > _HANDSHAKE_BYTES:
            self._refuse(pair)
            return b""
        if pair.inner is not None:
            return data
        pair.begun += data
        begun = pair.begun[: len(_GREETING)]
        if begun[:1] != _GREETING[:1] or begun[9:10] not in (b"", _GREETING[9:10]):
            self._refuse(pair)
        elif len(begun) == len(_GREETING):
            self._connect(pair)
            return pair.begun
        return b""

    def _connect(self, pair: _Pair) -> None:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.setblocking(False)
            inner.connect(self._target)
        except OSError:
            inner.close()
            raise
        pair.inner = inner
        self._selector.register(inner, selectors.EVENT_READ, pair)

    def _listen_to_answer(self, pair: _Pair, data: bytes) -> None:
        # The proxy has no key, so it cannot check keys itself. It need not: in CURVE, libzmq sends WELCOME only to a
        # client that used the server's key, and READY only after the authenticator has admitted the client's own key.
        # WELCOME and READY are at fixed offsets of the answer, because the greeting and WELCOME have constant lengths.
        # After READY, the connection is removed from its book and is no longer limited.
        pair.answered += data[: _READY_AT + len(_READY) - len(pair.answered)]
        pair.known = pair.answered[_WELCOME_AT : _WELCOME_AT + len(_WELCOME)] == _WELCOME
        if pair.known and pair.answered[_READY_AT:] == _READY:
            pair.ready = True
            pair.answered = bytearray()
            pair.book.pop(pair, None)

    # --- bytes

    def _read(self, pair: _Pair, source: socket.socket) -> None:
        target = pair.inner if source is pair.outer else pair.outer
        if target is not None and target in pair.waiting:
            return  # the target must first accept the earlier data
        try:
            data = source.recv(_READ_BYTES if pair.ready else _HANDSHAKE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self._end(pair)
            return
        if not pair.ready:
            if source is pair.outer:
                data = self._check(pair, data)
                target = pair.inner
            else:
                self._listen_to_answer(pair, data)
        if data and target is not None and not pair.ended:
            self._write(pair, target, memoryview(data))

    def _write(self, pair: _Pair, target: socket.socket, data: memoryview) -> None:
        with contextlib.suppress(BlockingIOError):
            data = data[target.send(data) :]
        if not data:
            return
        pair.waiting[target] = data
        self._watch(pair)

    def _flush(self, pair: _Pair, target: socket.socket) -> None:
        data = pair.waiting.pop(target, None)
        if data is not None:
            self._write(pair, target, data)
            self._watch(pair)

    def _watch(self, pair: _Pair) -> None:
        """Set the events for which the selector watches the two sockets of ``pair``.

        A socket is watched for writing while some data for this socket is not yet written. A socket is watched for
        reading only while the other socket has accepted all earlier data, so that TCP slows the sender down.
        """
        assert pair.inner is not None
        for one, other in ((pair.outer, pair.inner), (pair.inner, pair.outer)):
            mask = 0 if other in pair.waiting else selectors.EVENT_READ
            mask |= selectors.EVENT_WRITE if one in pair.waiting else 0
            with contextlib.suppress(KeyError):
                self._selector.unregister(one)
            if mask:
                self._selector.register(one, mask, pair)

    def _end(self, pair: _Pair) -> None:
        if pair.ended:
            return
        pair.ended = True
        pair.book.pop(pair, None)
        self._pairs.discard(pair)
        for one in (pair.outer, pair.inner):
            if one is None:
                continue
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(one)
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # a forked child may hold this socket too
            one.close()


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel end ``connection`` soon after the host at the other end is gone.

    ``keep_alive`` in line.py does the same for the client's end of such a connection.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", UNANSWERED_MS),
    ):
        if hasattr(socket, name):  # not on every system
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _worst(book: OrderedDict[_Pair, None]) -> _Pair:
    """Return the connection in ``book`` that must be ended first if there are too many connections.

    Return the oldest connection that has not sent valid first bytes. If there is none, return the oldest connection
    whose client has not shown that it knows the server's key. If there is none either, return the oldest connection.
    """
    return next((pair for pair in book if pair.inner is None), None) or next(
        (pair for pair in book if not pair.known), next(iter(book))
    )
