"""Choose the address of the live page, and find the library of its charts."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from ddl_dashboard.plugin import FORM
from ddlcore.plug.finding import find

FIRST_PORT = 8480
_PORTS = 20  # number of ports, beginning with FIRST_PORT, that are tried if the user does not name a port
_LOOPBACK = "127.0.0.1"
_BACKLOG = 64


@dataclass(frozen=True)
class Place:
    """The address at which the live page is served. ``port`` 0 means the first free port from FIRST_PORT on."""

    host: str = _LOOPBACK
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only programs on this host can connect. If so, the page needs no token."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def place_of(text: str) -> Place:
    """Parse ``text``, a value of the setting ``dashboard``, and return the place.

    Raises ValueError, with a message of one line, if the text has a wrong form or the port is above 65535.
    """
    if text in ("auto", "true", "True"):
        return Place()
    found = re.fullmatch(FORM, text)
    if found is None:
        raise ValueError(f"--dashboard {text}: that is no PORT and no HOST:PORT, such as 8480 or 0.0.0.0:8480")
    if int(found["port"]) > 65535:
        raise ValueError(f"--dashboard {text}: {found['port']} is no port number; the highest is 65535")
    return Place((found["host"] or _LOOPBACK).strip("[]"), int(found["port"]))


def listen(place: Place) -> socket.socket:
    """Return a socket that listens at ``place``.

    Raises ValueError, with a message of one line, if there is no free port, or if the user has named a port that is
    taken or an address that does not belong to this host.
    """
    if place.port:
        return _listen(place.host, place.port)
    for port in range(FIRST_PORT, FIRST_PORT + _PORTS):
        try:
            return _listen(place.host, port)
        except _Taken:
            continue
    raise ValueError(f"--dashboard: the ports {FIRST_PORT} to {FIRST_PORT + _PORTS - 1} are all taken; name another")


class _Taken(ValueError):
    pass


def _listen(host: str, port: int) -> socket.socket:
    where = f"--dashboard {f'[{host}]' if ':' in host else host}:{port}"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"{where}: no address is known for this host ({error.strerror})") from None
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise _Taken(f"{where}: the port is taken; without a port, the next free one is chosen") from None
        raise ValueError(f"{where}: {os.strerror(error.errno or 0)}") from None
    return listening


def url_of(listening: socket.socket, place: Place, token: str) -> str:
    """Return the address of the page for a browser. ``token`` is "" if the page needs no token.

    ``listening`` is the socket that ``listen`` returned for ``place``.
    """
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = socket.gethostname()
    elif place.host == "localhost" or not place.is_local:
        host = place.host
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/{f'?token={token}' if token else ''}"


def chart_library() -> Path | None:
    """Return the path of the charts' JavaScript library, a file of the package plotly, or None if it is missing."""
    spec = find("plotly")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    return file if file.is_file() else None
