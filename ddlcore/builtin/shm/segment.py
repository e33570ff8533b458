"""Creates anonymous shared memory and passes it to the other ranks of a host.

It does not know what the memory contains. Rank 0 creates a memfd, and passes its descriptor to the other ranks over an
abstract Unix socket. Rank 0 publishes the socket's random name and a token in the store. When the last rank has
received the memory, the socket is closed and the key is deleted from the store. So nothing is left behind when a rank
is killed, and no limit on /dev/shm applies.
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
    """Memory that several processes share, mapped into this process at ``address``. It is initially zero."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, nbytes)
        place = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(place)
        self.nbytes = nbytes
        del place  # the mapping cannot be closed while an exported buffer exists

    def close(self) -> None:
        """Unmap the memory. The address is invalid from then on."""
        self._map.close()


class _Patience:
    """A deadline for waiting, together with a function that says whether the wait must stop earlier."""

    def __init__(self, timeout_s: float, stop: Callable[[], bool]) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._stop = stop

    def slice(self, missing: str) -> float:
        """Return how many seconds to wait before the next call of this method. ``missing`` says what is waited for.

        Raises DeadlineExceeded after the deadline, and TransportError if the wait must stop. Their messages contain
        ``missing``.
        """
        self.check(missing)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"shm: opening the shared memory took too long: {missing}; raise --open-timeout-s")
        return min(left, SLICE_S)

    def check(self, missing: str) -> None:
        """Raise TransportError if the wait for ``missing`` must stop."""
        if self._stop():
            raise TransportError(f"shm: aborted while opening ({missing})")


def make(
    nbytes: int, peers: int, store: Store, timeout_s: float, stop: Callable[[], bool], head: bytes = b""
) -> Segment:
    """Create the memory on rank 0, and return it when all other ranks, ``peers`` in number, have received it.

    The memory begins with ``head``. Raises DeadlineExceeded after ``timeout_s``, and TransportError soon after
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
    # Every process in this network namespace, of whatever user, can connect to an abstract socket. So a peer must run
    # under our user id, which the kernel attests, and it must send the token. A peer gets the token from the
    # authenticated store of its job, so a rank of another job of the same user does not have the right token. The ranks
    # that were served are collected in a set: a rank that repeats its connection may be served twice, and must be
    # counted only once.
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
    """Pass the memory to the peer of ``connection``, and return the peer's rank, or None if the peer is a stranger.

    A stranger is a process of another user, or one that does not send the token in time. It gets nothing, and cannot
    delay the ranks for long.
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
    """Receive the memory on a rank other than rank 0.

    Raises DeadlineExceeded if rank 0 does not send it within ``timeout_s``, and TransportError if rank 0 cannot be
    reached or after ``stop()`` has become true.
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
    """Connect to rank 0's socket ``name``.

    While the socket's queue is full, retry: other users' connections may fill it.
    """
    while True:
        client.settimeout(patience.slice("too many connect to rank 0 at the same time"))
        try:
            client.connect("\0" + name)
            return
        except (BlockingIOError, TimeoutError):  # the queue is full
            time.sleep(RETRY_S)


def _await_descriptor(client: socket.socket, patience: _Patience) -> tuple[bytes, list[int]]:
    """Wait for rank 0's answer with the descriptor of the memory. Rank 0 may first serve other ranks."""
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
