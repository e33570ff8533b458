"""Find out at which of several endpoints the server with the right keys listens.

No key is shown to another process that listens at one of these endpoints.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Sequence

import msgspec

from ddlcore.control.credentials import Access
from ddlcore.control.line import FLUSHED, Connection, Line
from ddlcore.errors import DdlInternalError

_CONNECT_S = 2.0  # time within which a SYN must be answered
_BETTER_S = 0.05  # time after the first answer, within which a preferred endpoint may still answer


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return the host and the port in ``endpoint`` (``tcp://HOST:PORT``), without brackets around an IPv6 address."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def open_endpoints(endpoints: Sequence[str]) -> list[tuple[str, str]]:
    """Return (endpoint, own address) for each of ``endpoints`` at which some process listens.

    The own address is the address of this host on the route to the endpoint; it is "" for an ipc endpoint. The ipc
    endpoints are first in the result. The TCP endpoints follow in the same order as in ``endpoints``.
    """
    found = [(endpoint, "") for endpoint in endpoints if endpoint.startswith("ipc:") and _listens(endpoint)]
    return found + _tcp([endpoint for endpoint in endpoints if endpoint.startswith("tcp:")])


def answers(access: Access, rank: int, timeout_s: float) -> bool:
    """Return whether the server with the keys in ``access`` listens at ``access.endpoint`` and admits this process.

    This process connects as ``rank``. The server must answer within ``timeout_s`` seconds.
    """
    try:
        line = Line(Connection(access, rank), "s")
    except DdlInternalError:
        return False
    try:
        line.send(FLUSHED)
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if FLUSHED in line.receive(left_s):
                return True
    except DdlInternalError:
        pass
    finally:
        line.broken = line.broken or "only asked"  # marked as broken, so that ``close`` does not wait
        line.close()
    return False


def at(access: Access, endpoint: str) -> Access:
    """Return a copy of ``access`` with the same keys and another endpoint."""
    return msgspec.structs.replace(access, endpoint=endpoint)


def _listens(endpoint: str) -> bool:
    name = endpoint.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect("\0" + name[1:] if name.startswith("@") else name)
        except OSError:
            return False
    return True


def _tcp(endpoints: Sequence[str]) -> list[tuple[str, str]]:
    probes: dict[int, tuple[socket.socket, str]] = {}
    poll = select.poll()
    with contextlib.ExitStack() as opened:
        for endpoint in endpoints:
            probe = _begin(endpoint)
            if probe is not None:
                opened.enter_context(probe)
                probes[probe.fileno()] = (probe, endpoint)
                poll.register(probe.fileno(), select.POLLOUT)
        there: dict[str, str] = {}
        deadline_s = time.monotonic() + _CONNECT_S
        while probes and (left_s := deadline_s - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                poll.unregister(fd)
                probe, endpoint = probes.pop(fd)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    there[endpoint] = str(probe.getsockname()[0])
                    deadline_s = min(deadline_s, time.monotonic() + _BETTER_S)
    return [(endpoint, there[endpoint]) for endpoint in endpoints if endpoint in there]


def _begin(endpoint: str) -> socket.socket | None:
    """Begin to connect to ``endpoint`` without waiting, and return the socket.

    Returns None if connecting is impossible, for example because there is no route.
    """
    host, port = split_endpoint(endpoint)
    try:
        family, kind, number, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        probe = socket.socket(family, kind, number)
    except OSError:
        return None
    probe.setblocking(False)
    if probe.connect_ex(place) in (0, errno.EINPROGRESS):
        return probe
    probe.close()
    return None
