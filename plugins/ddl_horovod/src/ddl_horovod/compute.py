"""The meeting point of a training and the processes that prepare its data: who the dispatchers and workers of tf.data are.

A request is one connection. The service sends a random number; the client answers with a request, and both prove by an HMAC
over that number that they know the key. So nothing is parsed that somebody without the key has sent, and no request counts
twice.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Addresses = Mapping[str, Sequence[tuple[str, int]]]  # hosts and ports, by the name of a network interface
_NUMBER_BYTES = 32
_DIGEST_BYTES = 32
_LARGEST_BYTES = 4096
_ANSWER_S = 10.0  # for a peer that sends or receives a few bytes
_LOOK_S = 20.0  # how long one request waits at most; a longer wait is several requests


def make_key() -> bytes:
    """Return a new secret key."""
    return secrets.token_bytes(32)


class ComputeService:
    """The service of one job that prepares data. Any thread may call the methods.

    There are ``dispatchers`` dispatchers, each with ``workers_per_dispatcher`` workers. ``key``: what clients must know.
    ``host``: the address of this host at which other hosts reach the service; "": only this host does.
    """

    def __init__(self, dispatchers: int, workers_per_dispatcher: int, key: bytes, host: str = "") -> None:
        if dispatchers < 1 or workers_per_dispatcher < 1:
            raise ValueError(
                f"there must be dispatchers and workers, not {dispatchers} with {workers_per_dispatcher} each"
            )
        self._dispatchers: dict[int, str] = {}
        self._workers: dict[int, set[int]] = {number: set() for number in range(dispatchers)}
        self._wanted = workers_per_dispatcher
        self._is_over = False
        self._answering = 0  # requests whose senders know the key, and which have no answer yet
        self._changed = threading.Condition()
        handler = type("Handler", (_Handler,), {"key": key, "service": self, "timeout": _ANSWER_S})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (_ComputeServer,), {"address_family": family})
        self._server = server((host or "127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="ddl-compute", daemon=True)
        self._thread.start()

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Return where the service can be reached, as clients take it."""
        host, port = self._server.server_address[:2]
        return {"": [(str(host), int(port))]}

    def shutdown(self) -> None:
        """Tell all workers to end, and end the service when the requests that it has are answered.

        This takes at most 20 s, even if clients do not read their answers.
        """
        self.answer({"do": "shutdown"})
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_ANSWER_S)
        with self._changed:
            self._changed.wait_for(lambda: not self._answering, _ANSWER_S)

    @contextlib.contextmanager
    def one_request(self) -> Iterator[None]:
        """Within the ``with`` block, an answer is made and sent; ``shutdown`` waits for its end."""
        with self._changed:
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Carry out ``request``, and return the answer. Return None if a wait ends without what was waited for.

        The request says how long it may wait, in seconds.

        Raises ValueError, KeyError or TypeError, whose text the client is sent, if the request cannot be answered.
        """
        what, number = request["do"], int(request.get("dispatcher", 0))
        if number not in self._workers:
            raise ValueError(f"there is no dispatcher {number}, but dispatchers 0 to {len(self._workers) - 1}")
        with self._changed:
            if what == "register_dispatcher":
                if self._dispatchers.setdefault(number, str(request["address"])) != request["address"]:
                    raise ValueError(f"dispatcher {number} is registered already, at {self._dispatchers[number]}")
            elif what == "register_worker":
                self._workers[number].add(int(request["worker"]))
            elif what == "shutdown":
                self._is_over = True
            self._changed.notify_all()
            ready: dict[str, Callable[[], Any]] = {
                "wait_dispatcher": lambda: self._dispatchers.get(number),
                "wait_workers": lambda: len(self._workers[number]) >= self._wanted or None,
                "wait_shutdown": lambda: self._is_over or None,
            }
            if what in ready:
                wait_s = min(float(request["wait_s"]), _LOOK_S)
                self._changed.wait_for(lambda: self._is_over or ready[what]() is not None, wait_s)
                found = ready[what]()
                if found is None and self._is_over:
                    raise ValueError("the service ends, so nothing more will be registered")
                return found
        return True


class _ComputeServer(socketserver.ThreadingTCPServer):
    # A peer that does not know the key, and sends a byte now and then, must not hold up ``shutdown``.
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a client that has gone is no fault of this process."""


class _Handler(socketserver.StreamRequestHandler):
    """One request to a ComputeService."""

    key: bytes
    service: ComputeService

    def handle(self) -> None:
        number = os.urandom(_NUMBER_BYTES)
        self.wfile.write(number)
        body = _read(self.rfile, self.key, number + b"?")
        if body is None:
            return  # it does not know the key
        with self.service.one_request():
            try:
                reply = {"answer": self.service.answer(json.loads(body))}
            except (ValueError, KeyError, TypeError) as error:
                reply = {"error": f"{error}"}
            self.wfile.write(_signed(json.dumps(reply).encode(), self.key, number + b"!"))


def _signed(body: bytes, key: bytes, number: bytes) -> bytes:
    return struct.pack("!I", len(body)) + hmac.digest(key, number + body, "sha256") + body


def _read(file: Any, key: bytes, number: bytes) -> bytes | None:
    """Return the body of a message, or None if whoever has sent it does not know the key, or has sent something else."""
    try:
        head = file.read(4 + _DIGEST_BYTES)
        if len(head) < 4 + _DIGEST_BYTES or struct.unpack("!I", head[:4])[0] > _LARGEST_BYTES:
            return None
        body: bytes = file.read(struct.unpack("!I", head[:4])[0])
    except OSError:
        return None
    return body if hmac.compare_digest(head[4:], hmac.digest(key, number + body, "sha256")) else None


class ComputeClient:
    """The connection of one process to a ComputeService. ``verbose`` has no effect."""

    def __init__(self, compute_addresses: Addresses, key: bytes, verbose: int = 1) -> None:
        self._addresses = [(str(host), int(port)) for found in compute_addresses.values() for host, port in found]
        self._key = key

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Say where the dispatcher with this number is. Raises ValueError if another one has this number."""
        self._ask("register_dispatcher", dispatcher=dispatcher_id, address=dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Return where the dispatcher with this number is. Raises TimeoutError if it is not known within ``timeout`` s."""
        what = f"dispatcher {dispatcher_id} has not been registered"
        return str(self._wait("wait_dispatcher", what, timeout, dispatcher=dispatcher_id))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Say that the worker ``worker_id`` of this dispatcher is ready."""
        self._ask("register_worker", dispatcher=dispatcher_id, worker=worker_id)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait until all workers of this dispatcher are ready. Raises TimeoutError after ``timeout`` seconds."""
        what = f"not all workers of dispatcher {dispatcher_id} have been registered"
        self._wait("wait_workers", what, timeout, dispatcher=dispatcher_id)

    def wait_for_shutdown(self) -> None:
        """Wait until somebody calls ``shutdown``, or the service is gone."""
        with contextlib.suppress(ConnectionError):
            while not self._ask("wait_shutdown", wait_s=_LOOK_S):
                pass

    def shutdown(self) -> None:
        """Tell all workers to end."""
        self._ask("shutdown")

    def _wait(self, do: str, what: str, timeout: float, **more: Any) -> Any:
        until = time.monotonic() + timeout
        while True:
            answer = self._ask(do, wait_s=max(0.0, until - time.monotonic()), **more)
            if answer is not None:
                return answer
            if time.monotonic() >= until:
                raise TimeoutError(f"{what} within {timeout:g} s")

    def _ask(self, do: str, **more: Any) -> Any:
        failure: OSError | None = None
        for address in self._addresses:
            try:
                with socket.create_connection(address, _ANSWER_S) as connection, connection.makefile("rwb") as file:
                    number = file.read(_NUMBER_BYTES)
                    if len(number) < _NUMBER_BYTES:
                        raise ConnectionError("it has closed the connection")
                    connection.settimeout(_LOOK_S + _ANSWER_S)
                    file.write(_signed(json.dumps({"do": do, **more}).encode(), self._key, number + b"?"))
                    file.flush()
                    body = _read(file, self._key, number + b"!")
            except OSError as error:
                failure = error
                continue
            if body is None:
                raise ConnectionError("the compute service has not answered: it has ended, or has another key")
            reply = json.loads(body)
            if "error" in reply:
                raise ValueError(f"compute service: {reply['error']}")
            return reply["answer"]
        raise ConnectionError(f"the compute service cannot be reached at {self._addresses}: {failure}")
