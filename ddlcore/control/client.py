"""Provide the two objects by which a rank's process uses the control network: its channel and its store.

The channel carries messages to and from the coordinator. The store is the job's key-value store.
"""

from __future__ import annotations

import time

import msgspec

from ddlcore.control.channel import Channel
from ddlcore.control.credentials import Access, read_job_file
from ddlcore.control.line import LAUNCHER, Connection, Line
from ddlcore.control.store import CLOSED, JobStore
from ddlcore.control.wake import Wake
from ddlcore.errors import DdlInternalError, DeadlineExceeded
from ddlcore.messages.coding import decode_from_coordinator, decode_store_reply, encode
from ddlcore.messages.store import StoreReply, StoreRequest
from ddlcore.messages.to_coordinator import ToCoordinator
from ddlcore.messages.to_rank import FromCoordinator
from ddlcore.reentry import Lock

_SLICE_S = 0.1  # delay at most until a waiting call notices that its store was closed


def connect(job_file: str, rank: int) -> tuple[Channel, JobStore]:
    """Return the channel and the store of ``rank`` for the job in ``job_file``. The caller must close both.

    ``job_file`` is the path of the job file. ``rank`` is the rank in the launch. The function returns before the
    launcher has answered. If there is no launcher, a later call of ``receive`` raises DdlInternalError. Raises
    DdlInternalError with a message of one line if the file is missing or malformed.
    """
    return connect_with(read_job_file(job_file), rank)


def connect_with(access: Access, rank: int, peer: str = LAUNCHER) -> tuple[Channel, JobStore]:
    """Return the channel and the store of ``rank``, without reading a job file. The caller must close both.

    ``access`` is the endpoint and the keys, which ``connect`` reads from a job file. ``peer`` names the process at
    the other end in error messages.
    """
    connection = Connection(access, rank, peer=peer)
    return ClientChannel(connection), ClientStore(connection)


class ClientChannel(Channel):
    """A channel to the coordinator. It has a socket of its own. ``wake`` interrupts ``receive``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._wake = Wake()
        self._line = Line(connection, "c", self._wake)

    def send(self, message: ToCoordinator) -> None:
        self._line.send(encode(message))

    def receive(self, timeout_s: float) -> list[FromCoordinator]:
        return [_readable(data, self._connection.peer) for data in self._line.receive(timeout_s)]

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        if not self._connection.foreign:
            self._line.close()
            self._wake.close()


class ClientStore(JobStore):
    """A client of the job's store that uses one or more sockets.

    A call opens a new socket if all existing sockets are in use. After the call, the socket is kept for later calls.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection.retain()  # retained, because the channel may be closed before the first call
        self._lock = Lock()
        self._idle: list[Line] = []
        self._closed = False

    def _call(self, request: StoreRequest, answer_s: float) -> StoreReply:
        if self._connection.foreign:
            raise DdlInternalError(f"this process was forked from rank {self._connection.rank} and has no store")
        with self._lock:
            if self._closed:
                return StoreReply(request.serial, b"", CLOSED)
            line = self._idle.pop() if self._idle else Line(self._connection, "s")
        try:
            line.send(encode(request))
            return self._reply(line, request.serial, answer_s)
        finally:
            with self._lock:
                keep = not self._closed and not line.broken
                if keep:
                    self._idle.append(line)
            if not keep:
                line.close()

    def close(self) -> None:
        if self._connection.foreign:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()
        self._connection.release()

    def _reply(self, line: Line, serial: int, answer_s: float) -> StoreReply:
        deadline_s = time.monotonic() + answer_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            for data in line.receive(min(left_s, _SLICE_S)):
                reply = decode_store_reply(data)
                if reply.serial == serial:  # other serials belong to calls that have timed out
                    return reply
            if self._closed:
                return StoreReply(serial, b"", CLOSED)
        raise DeadlineExceeded(f"store: {self._connection.peer} has not answered within {answer_s:g} s; is it stopped?")


def _readable(data: bytes, peer: str) -> FromCoordinator:
    try:
        return decode_from_coordinator(data)
    except msgspec.DecodeError as error:
        raise DdlInternalError(
            f"{peer} sent a message that this ddlcore cannot read ({error}); install the same version for both"
        ) from None
