"""Serve a rank's metrics over HTTP, with limits on the number and the duration of requests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MOST_AT_ONCE = 16  # requests at one time; a further request replaces the oldest request
REQUEST_S = 5.0  # time for each piece of a request to arrive


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because log lines about requests would appear in the output of the training."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, place: tuple[Any, ...]) -> None:
        self._served: dict[socket.socket, float] = {}
        self._turn = threading.Lock()
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        """Bind the socket without a lookup of the host's name, because the lookup may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the request in a new thread. If there are too many requests, close the oldest connection first."""
        with self._turn:
            while len(self._served) >= MOST_AT_ONCE:
                oldest = min(self._served, key=self._served.__getitem__)
                del self._served[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread sees a closed connection
            self._served[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._turn:
            self._served.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because an error here only means that the client or this server has closed the connection."""


def end_server(server: WSGIServer) -> None:
    """End ``serve_forever`` of ``server`` in another thread, and free the port. Return when both are done.

    The port is free even if a process that was forked from this one still has the socket.
    """
    with contextlib.suppress(OSError):
        server.socket.shutdown(socket.SHUT_RDWR)  # wakes the other thread, which otherwise looks twice per second
    server.shutdown()
    server.server_close()


def bounded_server(address: str, port: int, app: Callable[..., Iterable[bytes]]) -> WSGIServer:
    """Return a server that listens at ``address`` and ``port``.

    Call its method ``serve_forever`` to answer requests. ``app`` is the WSGI application that creates the answers.
    Raises OSError if the address or the port cannot be used, and OverflowError for an invalid port.
    """
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE) if port <= 65535 else []
    if not found:
        raise OverflowError("port must be 0-65535")
    family, place = found[0][0], found[0][4]
    server: WSGIServer = type("_Server", (_Server,), {"address_family": family})(place)
    server.set_app(app)
    return server
