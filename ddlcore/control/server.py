"""The launcher's end of the control network: one thread that moves messages between ranks, brain and store."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils import z85

from ddlcore.control.brain import Brain, Outgoing
from ddlcore.control.credentials import Access, JobFile, KeyPair
from ddlcore.control.files import allow_files
from ddlcore.control.line import FLUSHED, HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from ddlcore.control.post import packed
from ddlcore.control.store import Shelf
from ddlcore.control.wake import Wake
from ddlcore.errors import DdlInternalError
from ddlcore.messages import Hello, StoreReply, decode_store_request, decode_to_coordinator, encode

__all__ = ["Server"]

_TICK_S = 1.0  # how often the brain is asked what is overdue
_LINGER_MS = 200  # for last words to ranks when the server closes
_LARGEST_BYTES = 64 << 20  # a stranger's announcement of more ends its connection; ours stay far below
_NAME = re.compile(rb"([cs])(0|[1-9][0-9]{0,8})\.[0-9a-f]{8}")  # see Line: c to the coordinator, s to the store


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Server:
    """Serves the ranks 0 … ``size`` - 1 of one launch: admits who has the job's key, and nobody else.

    ``address`` "" is an ipc socket that leaves no file; "tcp://IP:PORT" (port 0: any) listens there.
    ``report`` gets lines for the user, in the server's thread. Raises ValueError for an address that
    is none, DdlInternalError when it is in use, or when this process may not open a file for each rank.
    """

    def __init__(self, size: int, brain: Brain, address: str = "", report: Callable[[str], None] = _to_stderr) -> None:
        allow_files(size)
        self.size = size
        self.dropped = 0  # messages that made no sense or came from no rank
        self._brain = brain
        self._report = report
        self._shelf: Shelf[bytes] = Shelf()
        self._lines: dict[int, bytes] = {}  # by rank: the name of the connection it last spoke from
        self._said: Outgoing = []  # by the brain in this turn
        self._ended: deque[tuple[int, str]] = deque()
        self._stopping = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._directory = "" if address or sys.platform == "linux" else tempfile.mkdtemp(prefix="ddl-")  # 0700
        keys, clients = KeyPair(), KeyPair()
        self._admitted = z85.decode(clients.public)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._doorman = self._context.socket(zmq.REP)
        self._doorman.linger = 0
        self._doorman.bind("inproc://zeromq.zap.01")
        self._router = self._open_router(keys)
        self._wake = Wake()
        try:
            self.endpoint = self._bind(address or self._ipc_address())
        except Exception:
            self._release()
            raise
        self._job_file = JobFile(Access(self.endpoint, os.getpid(), keys.public, clients.public, clients.secret))
        self.job_file = self._job_file.path

    def start(self) -> None:
        """Starts the thread; once."""
        self._thread = threading.Thread(target=self._run, name="ddl-coordinator", daemon=True)
        self._thread.start()

    def rank_ended(self, rank: int, reason: str) -> None:
        """The process of ``rank`` has ended, cleanly or not. Any thread; returns at once."""
        self._ended.append((rank, reason))
        self._wake.set()

    def close(self) -> None:
        """Ends the network and takes the job file away; ranks that are still there see the launcher as gone.

        Any thread but the server's; may be repeated.
        """
        if self._closed:
            return
        self._closed = True
        self._job_file.close()
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._thread is None or not self._thread.is_alive():
            self._release()

    # --- opening and closing

    def _open_router(self, keys: KeyPair) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.curve_server = True
        router.setsockopt(zmq.ZAP_DOMAIN, b"ddl")
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a doorman nobody gets in, rather than anybody
        router.curve_secretkey = keys.secret.encode()
        router.sndhwm = router.rcvhwm = 0  # a rank that does not read must not hold up the others
        router.linger = _LINGER_MS
        router.setsockopt(zmq.BACKLOG, 4096)
        router.setsockopt(zmq.MAXMSGSIZE, _LARGEST_BYTES)
        return router

    def _ipc_address(self) -> str:
        if self._directory:
            return f"ipc://{self._directory}/control"
        return f"ipc://@ddl-{secrets.token_hex(8)}"  # abstract: a name without a file, gone with the process

    def _bind(self, address: str) -> str:
        if address.startswith("tcp:"):
            self._router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
            self._router.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
        elif not address.startswith("ipc:"):
            raise ValueError(f"control network: {address!r} is neither tcp://IP:PORT nor an ipc address")
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                text = f"control network: {address} is in use; choose another port, or 0 for any free one"
                raise DdlInternalError(text) from None
            raise ValueError(f"control network: cannot listen at {address!r}: {error.strerror}") from None
        bound = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()

    def _release(self) -> None:
        self._close_sockets()
        self._context.term()
        self._wake.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _close_sockets(self) -> None:
        """Both: a router whose doorman no longer answers does not let go of its connections."""
        self._router.close()
        self._doorman.close()

    # --- the server's thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # nothing can be answered rightly any more: the ranks must see an end, not a silence
            self._report(f"the coordinator failed, the job ends\n{traceback.format_exc()}")
        finally:
            self._close_sockets()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._doorman, self._wake.fileno()):
            poller.register(source, zmq.POLLIN)
        tick_s = time.monotonic() + _TICK_S
        while not self._stopping:
            until_s = min(tick_s, self._shelf.deadline_s() or tick_s)
            poller.poll(max(math.ceil((until_s - time.monotonic()) * 1000), 0))
            self._wake.clear()
            self._admit()
            self._read()
            while self._ended:
                self._said += self._brain.rank_ended(*self._ended.popleft())
                self._lose()
            self._tell()
            now_s = time.monotonic()
            self._reply(self._shelf.expire(now_s))
            if now_s >= tick_s:
                tick_s = now_s + _TICK_S
                for text in self._brain.overdue(now_s):
                    self._report(text)

    def _admit(self) -> None:
        """The ZAP protocol (ZeroMQ RFC 27): who asks with the clients' key gets in."""
        with contextlib.suppress(zmq.Again):
            while True:
                version, request, _domain, _address, _name, *credentials = self._doorman.recv_multipart(zmq.NOBLOCK)
                known = credentials == [b"CURVE", self._admitted]
                code, text = (b"200", b"OK") if known else (b"400", b"no key of this job")
                self._doorman.send_multipart([version, request, code, text, b"", b""])

    def _read(self) -> None:
        """All that has arrived, but not for ever: the rest of the loop gets its turn."""
        with contextlib.suppress(zmq.Again):
            for _ in range(4 * self.size + 16):
                self._take(self._router.recv_multipart(zmq.NOBLOCK))

    def _take(self, frames: list[bytes]) -> None:
        name, data = frames[0], frames[-1]
        match = _NAME.fullmatch(name)
        rank = int(match[2]) if match else -1
        if match is None or rank >= self.size or len(frames) != 2:
            self._drop("from a connection that is no rank's")
        elif data == FLUSHED:
            self._send(name, FLUSHED)
        else:
            try:
                if match[1] == b"c":
                    self._to_brain(rank, name, data)
                else:
                    request = decode_store_request(data)
                    self._reply(self._shelf.handle(name, rank, request, time.monotonic()))
            except msgspec.DecodeError as error:
                self._drop(f"from rank {rank} that cannot be read ({error})")
            except DdlInternalError as error:
                self._drop(f"from rank {rank} that is out of place ({error})")

    def _to_brain(self, rank: int, name: bytes, data: bytes) -> None:
        message = decode_to_coordinator(data)
        self._lines[rank] = name
        if isinstance(message, Hello):
            self._shelf.hello(rank)
        self._said += self._brain.handle(rank, message)
        self._lose()

    def _tell(self) -> None:
        said, self._said = self._said, []
        for rank, data in packed(said):
            if rank in self._lines:
                self._send(self._lines[rank], data)

    def _lose(self) -> None:
        self._reply(self._shelf.lose(self._brain.lost()))

    def _reply(self, replies: list[tuple[bytes, StoreReply]]) -> None:
        for name, reply in replies:
            self._send(name, encode(reply))

    def _send(self, name: bytes, data: bytes) -> None:
        with contextlib.suppress(zmq.Again, zmq.ZMQError):  # a rank that is gone hears nothing
            self._router.send_multipart([name, data], zmq.NOBLOCK)

    def _drop(self, what: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            self._report(f"control network: dropped a message {what}; further ones are only counted")
