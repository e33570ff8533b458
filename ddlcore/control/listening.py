"""Open listening sockets: Unix sockets that only processes of this user can reach, and TCP ports."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from typing import Any

from ddlcore.contracts.interfaces import interface_addresses

_BACKLOG = 4096


class OwnSocket:
    """A listening Unix socket to which no other user can connect. It leaves no file behind.

    The constructor creates the socket in a new directory (mode 0700), and removes this directory before it returns.
    After that, clients reach the socket at ``path``, through a descriptor of this process in /proc. The kernel shows
    this descriptor only to processes of this user and to root. An abstract socket would be open to every user of the
    host. Raises OSError if the system does not support this.
    """

    def __init__(self) -> None:
        self._place = -1
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        directory = tempfile.mkdtemp(prefix="ddl-")
        try:
            name = os.path.join(directory, "control")
            self.socket.bind(name)
            os.chmod(name, 0o600)
            self._place = os.open(name, getattr(os, "O_PATH", 0) | os.O_CLOEXEC | os.O_NOFOLLOW)
            self.path = f"/proc/{os.getpid()}/fd/{self._place}"
            self.socket.listen(_BACKLOG)
            self.socket.setblocking(False)
            self._try()
        except BaseException:
            self.socket.close()
            self.close()
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Make ``path`` invalid. The socket itself stays open: its owner closes it. May be called again."""
        if self._place >= 0:
            os.close(self._place)
            self._place = -1

    def _try(self) -> None:
        """Connect to ``path`` as a test, because some sandboxes have /proc but do not allow such connections.

        Raises OSError if the connection fails.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(self.path)
            self.socket.accept()[0].close()


def tcp_listener(address: str) -> socket.socket:
    """Return a socket that listens at ``address``, which has the form ``tcp://HOST:PORT``.

    HOST is an IP address or a network interface of this host, or ``*`` for all IPv4 interfaces. Raises ValueError if
    ``address`` has another form, and OSError if the socket cannot listen there.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("it is not tcp://HOST:PORT")
    family, place = _place_of(host.strip("[]"), int(port))
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):  # accept both families if the address stands for all
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def tcp_name(listener: socket.socket) -> str:
    """Return the address of the listening TCP socket ``listener`` in the form ``tcp://HOST:PORT``."""
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _place_of(host: str, port: int) -> tuple[int, Any]:
    if host == "*":
        host = "0.0.0.0"
    elif host in (have := interface_addresses()):
        if not have[host]:
            raise OSError(errno.EADDRNOTAVAIL, f"the interface {host} has no address")
        host = have[host][0]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE)
    return found[0][0], found[0][4]
