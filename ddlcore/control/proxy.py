"""Stands before the control network's TCP port: limits connections that have not shown a key, and passes on the bytes of all.

libzmq itself accepts whoever connects, reads what they announce, and aborts the process when its descriptors run out.
So it listens at a Unix socket that only this user reaches, and this proxy connects there for each TCP connection that
begins as ZeroMQ's protocol does. It holds no key. That a connection is authenticated it sees by the answers of libzmq:
WELCOME goes to who knows the server's key, READY to who has one of the job's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from ddlcore.control.peers import is_ours, local_tcp_uid
from ddlcore.control.wake import Wake

__all__ = ["HANDSHAKE_S", "TcpProxy"]

HANDSHAKE_S = 5.0  # how long a connection may take to show that it knows the server's key
_KEY_S = 30.0  # how long it may take then to show its own: the thread that judges it may be busy
_STRANGERS = 16  # of other users of this host, at a time, before they have shown a key
_EXTRA = 64  # of everybody else, beside those that the job's own ranks may open at once
_FEWEST = 16
_FILES_EACH = 3  # the connection, and both ends of what leads on to libzmq
_FILES_SPARE = 64  # for all else that the process may open meanwhile
_HANDSHAKE_BYTES = 2048  # a handshake has about 800
_GREETING = (
    b"\xff\0\0\0\0\0\0\0\1\x7f"  # how ZeroMQ's protocol begins since its version 2; all of it is constant for us
)
_WELCOME_AT, _WELCOME = 64, b"\x04\xa8\x07WELCOME"  # behind the greeting, in what libzmq answers
_READY_AT, _READY = 64 + 170 + 2, b"\x05READY"  # behind WELCOME, and the head of its own frame
_READ_BYTES = 1 << 18
_ACCEPT_AT_ONCE = 64
_PAUSE_S = 0.05
_TICK_S = 0.5
_DRAIN_S = 0.3  # at the end, for last words that libzmq has sent


@dataclass(eq=False)
class _Pair:
    """A TCP connection, and what leads on to libzmq once it has begun well."""

    outer: socket.socket
    book: OrderedDict[_Pair, None]  # of its kind: those that have shown no key, the oldest first
    deadline_s: float
    inner: socket.socket | None = None
    known: bool = False  # libzmq has said WELCOME
    prolonged: bool = False  # its deadline, for that
    ready: bool = False  # it is authenticated
    shown: int = 0  # bytes that came before it was
    begun: bytes = b""  # while they are not enough to connect
    answered: bytearray = field(default_factory=bytearray)
    waiting: dict[socket.socket, memoryview] = field(default_factory=dict)  # by target: what it has not taken yet
    ended: bool = False


class TcpProxy:
    """Listens with ``listener`` and connects to ``target``, a Unix socket. Built by one thread, closed by one.

    ``expected``: connections that the job's own ranks and agents may open at the same time.
    """

    def __init__(self, listener: socket.socket, target: str, expected: int) -> None:
        self.refused = 0  # connections that were ended because they had shown no key
        self._listener = listener
        self._target = target
        self._pid = os.getpid()
        self._strangers: OrderedDict[_Pair, None] = OrderedDict()
        self._others: OrderedDict[_Pair, None] = OrderedDict()
        self._expected = expected
        self._most = self._room()
        self._pairs: set[_Pair] = set()
        self._paused_s = 0.0
        self._stopping = False
        self._wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake.fileno(), selectors.EVENT_READ)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="ddl-tcp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections, after what libzmq has sent went out, or 0.3 s. Does nothing in a forked child."""
        if os.getpid() != self._pid or self._stopping:
            return
        self._stopping = True
        self._wake.set()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._wake.close()

    def _room(self) -> int:
        """How many may be without a key at a time, so that descriptors are left for those who have one."""
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
            except OSError:  # the other end is gone
                self._end(pair)
        self._expire(time.monotonic())

    def _stop_accepting(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()

    # --- who has shown no key

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
                continue  # it has gone again
            self._admit(outer)

    def _admit(self, outer: socket.socket) -> None:
        uid = local_tcp_uid(outer)
        stranger = uid >= 0 and not is_ours(uid)
        book, most = (self._strangers, _STRANGERS) if stranger else (self._others, self._most)
        while len(book) >= most:
            self._refuse(_worst(book))
        pair = _Pair(outer, book, time.monotonic() + HANDSHAKE_S)
        outer.setblocking(False)
        with contextlib.suppress(OSError):
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        book[pair] = None
        self._pairs.add(pair)
        self._selector.register(outer, selectors.EVENT_READ, pair)

    def _make_room(self) -> None:
        """No descriptor is left: the oldest without a key goes; where there is none, nobody is accepted for a while."""
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
        """What of ``data``, which came before the key was shown, may be passed on now."""
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
            return  # it has to take what came before
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
        """Waits to write where something is left, and reads only what can be passed on: TCP holds the sender back."""
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
                one.shutdown(socket.SHUT_RDWR)  # a forked child may hold it, too
            one.close()


def _worst(book: OrderedDict[_Pair, None]) -> _Pair:
    """Who goes first where there are too many: who has sent nothing, then who does not know the server's key."""
    return next((pair for pair in book if pair.inner is None), None) or next(
        (pair for pair in book if not pair.known), next(iter(book))
    )
