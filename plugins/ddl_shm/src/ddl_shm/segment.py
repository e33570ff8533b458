"""Creates anonymous shared memory on rank 0, and passes it to the other ranks of the host.

Rank 0 creates a memfd, and passes its file descriptor to the other ranks over an abstract Unix socket. Rank 0 publishes
the socket's random name and a secret token under one key in the store. When the last rank has received the memory, rank
0 closes the socket and deletes the key from the store. So nothing is left behind when a rank is killed, and no limit on
/dev/shm applies. This module does not use the content of the memory.
"""

from __future__ import annotations

import ctypes
import hmac
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable

from ddlcore.contracts.store import Store
from ddlcore.errors import DeadlineExceeded, TransportError

KEY = "segment"
TOKEN_BYTES = 32
BACKLOG = 1024  # large, so that connections of other users, which are refused later, do not fill the queue
RETRY_S = 0.01
STRANGER_S = 2.0  # how long a connection may take to send its token
SLICE_S = 0.1  # how soon a wait notices that it must stop
ANSWER = b"memory"


class Segment:
    """Memory that several processes share, mapped into this process at ``address``.

    ``descriptor`` is the file descriptor of the memory, and ``nbytes`` its size. New memory is filled with zeros.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, nbytes)
        place = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(place)
        self.nbytes = nbytes
        del place  # the mapping cannot be closed while an exported buffer exists

    def close(self) -> None:
        """Unmap the memory from this process. After this call, ``address`` must not be used."""
        self._map.close()


class _Patience:
    """A deadline for waiting, together with a function ``stop`` that returns whether the wait must end earlier."""

    def __init__(self, timeout_s: float, stop: Callable[[], bool]) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._stop = stop

    def slice(self, missing: str) -> float:
        """Return the number of seconds that the caller may wait before it calls this method again.

        ``missing`` is a text that says why the caller still waits. Raises DeadlineExceeded after the deadline, and
        TransportError if the wait must stop. The messages of both errors contain ``missing``.
        """
        self.check(missing)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"shm: opening the shared memory took too long: {missing}; raise --open-timeout-s")
        return min(left, SLICE_S)

    def check(self, missing: str) -> None:
        """Raise TransportError if the wait must stop. The message contains ``missing``, as in ``slice``."""
        if self._stop():
            raise TransportError(f"shm: aborted while opening ({missing})")


def make(
    nbytes: int, peers: int, store: Store, timeout_s: float, stop: Callable[[], bool], head: bytes = b""
) -> Segment:
    """Create the memory on rank 0, pass it to all other ranks, and return it when all of them have received it.

    ``peers`` is the number of the other ranks. ``head`` is written to the beginning of the memory. Raises
    DeadlineExceeded if a rank has not received the memory after ``timeout_s``. Raises TransportError soon after
    ``stop()`` becomes true.
    """
    patience = _Patience(timeout_s, stop)
    descriptor = os.memfd_create("ddl", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        os.pwrite(descriptor, head, 0)
        segment = Segment(descriptor, nbytes)
        try:
            _serve(descriptor, nbytes, peers, store, patience)
        except BaseException:
            segment.close()
            raise
        return segment
    finally:
        os.close(descriptor)


def _serve(descriptor: int, nbytes: int, peers: int, store: Store, patience: _Patience) -> None:
    # Every process of every user in this network namespace can connect to an abstract socket. So a peer must run under
    # our user id, which the kernel reports, and the peer must send the token. A peer gets the token from the
    # authenticated store of its job, so a rank of another job of the same user does not have the right token. The ranks
    # that were served are collected in a set: a rank that connects again may be served twice, and must be counted only
    # once.
    token = secrets.token_bytes(TOKEN_BYTES)
    name = f"ddl-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind("\0" + name)
        server.listen(max(peers, BACKLOG))
        store.set(KEY, token + struct.pack("<q", nbytes) + name.encode())
        served: set[int] = set()
        while len(served) < peers:
            server.settimeout(patience.slice(f"{peers - len(served)} of {peers} ranks have not come for it"))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection:
                rank = _serve_one(connection, token, descriptor)
            if rank is not None:
                served.add(rank)
    store.delete(KEY)


def _serve_one(connection: socket.socket, token: bytes, descriptor: int) -> int | None:
    """Pass the memory to the process at the other end of ``connection``, and return the rank of that process.

    Return None, and pass no memory, if the process belongs to another user, or if it has not sent the right token after
    2 s. So a foreign process gets nothing, and cannot delay the ranks for long. ``descriptor`` is the file descriptor
    of the memory.
    """
    connection.settimeout(STRANGER_S)
    try:
        if _peer_uid(connection) != os.getuid():
            return None
        shown = _receive_exactly(connection, TOKEN_BYTES + 4)
        if not hmac.compare_digest(shown[:TOKEN_BYTES], token):
            return None
        socket.send_fds(connection, [ANSWER], [descriptor])
    except OSError:
        return None
    return int.from_bytes(shown[TOKEN_BYTES:], "little")


def receive(rank: int, store: Store, timeout_s: float, stop: Callable[[], bool]) -> Segment:
    """Receive the memory from rank 0. ``rank`` is the rank of this process, which is not 0.

    Raises DeadlineExceeded if rank 0 does not send the memory within ``timeout_s``. Raises TransportError if rank 0
    cannot be reached, if rank 0 refuses, or soon after ``stop()`` becomes true.
    """
    patience = _Patience(timeout_s, stop)
    card = store.get_checked(KEY, timeout_s, lambda: patience.check("rank 0 has not made the memory"))
    token, name = card[:TOKEN_BYTES], card[TOKEN_BYTES + 8 :].decode()
    (nbytes,) = struct.unpack("<q", card[TOKEN_BYTES : TOKEN_BYTES + 8])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            _connect(client, name, patience)
            if _peer_uid(client) != os.getuid():
                raise TransportError(f"shm: the socket of rank 0 belongs to user {_peer_uid(client)}, not to us")
            client.sendall(token + rank.to_bytes(4, "little"))
            answer, descriptors = _await_descriptor(client, patience)
        except OSError as error:
            raise TransportError(
                f"shm: cannot reach rank 0 on this host ({error.strerror}); are the ranks in one network namespace? "
                "Else choose another --backend"
            ) from error
    if not descriptors:
        raise TransportError(f"shm: rank 0 refused to hand out the shared memory (answered {answer!r})")
    try:
        return Segment(descriptors[0], nbytes)
    finally:
        os.close(descriptors[0])


def _connect(client: socket.socket, name: str, patience: _Patience) -> None:
    """Connect ``client`` to rank 0's abstract socket, which is called ``name``.

    Retry while the queue of rank 0's socket is full. Connections of other users may fill this queue.
    """
    while True:
        client.settimeout(patience.slice("too many connect to rank 0 at the same time"))
        try:
            client.connect("\0" + name)
            return
        except (BlockingIOError, TimeoutError):  # the queue is full
            time.sleep(RETRY_S)


def _await_descriptor(client: socket.socket, patience: _Patience) -> tuple[bytes, list[int]]:
    """Wait for rank 0's answer, and return (bytes of the answer, list with the file descriptor of the memory).

    The list is empty if rank 0 sent no descriptor. The wait may be long, because rank 0 may serve other ranks first.
    """
    while True:
        client.settimeout(patience.slice("rank 0 does not hand it out"))
        try:
            answer, descriptors, _, _ = socket.recv_fds(client, len(ANSWER), 1)
            return answer, descriptors
        except TimeoutError:
            continue


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = connection.recv(count - len(got))
        if not more:
            raise ConnectionResetError
        got += more
    return got
