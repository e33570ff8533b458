"""The program of a process that is one rank in a test, and that calls a transport on behalf of the test's process.

processes.py starts this process as ``python -m ddl_conform.process_rank SOCKET module:Class [module:function]``.
The test's process sends requests over the socket. The messages are encoded in msgpack. No other user can open the
folder of the socket.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ddl_conform.group import GUARD_BYTES, GUARD_VALUE
from ddlcore.contracts.store import Store
from ddlcore.contracts.transport import Context, Transport, Work
from ddlcore.errors import DeadlineExceeded
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.types import Buffer, DType, Member, ReduceOp

__all__ = ["MessageLine", "belongings", "main", "named"]


class MessageLine:
    """A connection that sends and receives messages. A message is a list of values.

    Only one thread at a time may use the connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def say(self, *words: object) -> None:
        """Send one message that consists of ``words``, which may be any values that msgpack can encode."""
        data = msgspec.msgpack.encode(words)
        self._connection.sendall(struct.pack("=Q", len(data)) + data)

    def hear(self) -> list[Any]:
        """Wait for one message and return its values. Raises EOFError if the other process closes the connection."""
        (length,) = struct.unpack("=Q", self._read(8))
        words: list[Any] = msgspec.msgpack.decode(self._read(length))
        return words

    def _read(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        at = memoryview(data)
        while at:
            got = self._connection.recv_into(at)
            if not got:
                raise EOFError("the other side has gone")
            at = at[got:]
        return data


def named(target: str) -> Any:
    """Import and return the object that ``target`` names in the form "module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def belongings() -> dict[str, set[str]]:
    """Return the names of the threads, file descriptors and shared memory of this process, by kind.

    A kind that this operating system does not list in /proc or /dev/shm is left out.
    """
    gc.collect()
    kept = {"Python threads": {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}}
    for kind, path in (("threads", "/proc/self/task"), ("descriptors", "/proc/self/fd"), ("shared memory", "/dev/shm")):
        if os.path.isdir(path):
            kept[kind] = {_shown(path, name) for name in os.listdir(path)}
    return kept


def _shown(path: str, name: str) -> str:
    try:
        return f"{name} -> {os.readlink(os.path.join(path, name))}" if path.endswith("/fd") else name
    except OSError:  # the descriptor of the listing itself
        return name


class _DistantStore(Store):
    """A store that passes each call to the store in the test's process, and returns the answer of that store.

    Any thread may call the methods.
    """

    def __init__(self, line: MessageLine) -> None:
        self._line = line
        self._lock = threading.Lock()

    def _ask(self, *words: object) -> Any:
        with self._lock:
            self._line.say(*words)
            late, value = self._line.hear()
        if late:
            raise DeadlineExceeded(value)
        return value

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        return bytes(self._ask("get", key, timeout_s))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def delete(self, prefix: str) -> None:
        self._ask("delete", prefix)


class _Place:
    """A copy of one buffer of the test's process, with guard bytes before and after it in memory.

    ``address`` is the address of the buffer in the test's process. The copy has the same offset from the beginning of a
    cache line as this address.
    """

    def __init__(self, address: int, content: bytes) -> None:
        self._raw = np.full(len(content) + 2 * GUARD_BYTES + 64, GUARD_VALUE, np.uint8)
        self._begin = GUARD_BYTES + (address - self._raw.ctypes.data - GUARD_BYTES) % 64
        self._end = self._begin + len(content)
        self._raw[self._begin : self._end] = np.frombuffer(content, np.uint8)
        self.address = self._raw.ctypes.data + self._begin

    def content(self) -> bytes:
        guards = self._raw[: self._begin], self._raw[self._end :]
        assert all((guard == GUARD_VALUE).all() for guard in guards), "bytes around the memory were written over"
        return self._raw[self._begin : self._end].tobytes()


class _Rank:
    """The transports of this rank, each with a number, and the call that is in progress on each transport.

    The test's process calls the methods by their names.
    """

    def __init__(self, store: Store, make: type[Transport]) -> None:
        self._store = store
        self._make = make
        self.transports: dict[int, Transport] = {}
        self._works: dict[int, tuple[Work, list[_Place]]] = {}

    def make(self, number: int) -> None:
        self.transports[number] = self._make()

    def open(
        self,
        number: int,
        rank: int,
        members: list[list[int]],
        settings: Mapping[str, str | int | float | bool],
        timeout_s: float,
        name: str,
    ) -> None:
        kernels = CpuKernels(str(settings.get("cache_dir", "")))
        whole = tuple(Member(*member) for member in members)
        self.transports[number].open(Context(rank, whole, self._store, kernels, settings, timeout_s, name))

    def call(
        self, number: int, verb: str, memory: list[tuple[int, bytes]], buffers: list[list[Any]], rest: list[Any]
    ) -> None:
        places = [_Place(address, content) for address, content in memory]
        arguments: list[Any] = [
            Buffer(
                places[place].address,
                count,
                DType(dtype),
                tuple(shape),
                strides and tuple(strides),
                owner=places[place],
            )
            for place, count, dtype, shape, strides in buffers
        ]
        if verb in ("allreduce", "reducescatterv"):
            rest[-1] = ReduceOp(rest[-1])
        self._works[number] = getattr(self.transports[number], verb)(*arguments, *rest), places

    def wait(self, number: int, timeout_s: float) -> list[bytes] | None:
        """Wait until the call of the transport ``number`` is complete, and return the content of each of its buffers.

        Return None if the call is not complete after ``timeout_s`` seconds.
        """
        work, places = self._works[number]
        if not work.wait(timeout_s):
            return None
        del self._works[number]
        return [place.content() for place in places]

    def close(self, number: int) -> None:
        self.transports[number].close()

    def drop(self, number: int) -> None:
        self.transports.pop(number, None)
        self._works.pop(number, None)

    def belongings(self) -> dict[str, list[str]]:
        return {kind: sorted(names) for kind, names in belongings().items()}


def main(path: str, target: str, first: str = "") -> None:
    """Execute the requests of the test's process, until that process closes the connection.

    ``path`` is the path of the socket of the test's process. ``target`` names the transport as "module:Class".
    ``first`` names a function as "module:function", which is called before the first request; "" means none.
    """
    make = named(target)
    if first:
        named(first)()
    line = _connect(path)
    line.say("rank", os.getpid())
    store_line = _connect(path)
    store_line.say("store", os.getpid())
    rank = _Rank(_DistantStore(store_line), make)
    threading.Thread(target=_abort, args=(path, rank), name="abort", daemon=True).start()
    while True:
        try:
            verb, *arguments = line.hear()
        except (EOFError, OSError):
            os._exit(0)  # do not wait for calls that a test has left pending
        _answer(line, lambda: getattr(rank, verb)(*arguments))  # noqa: B023  # called at once


def _abort(path: str, rank: _Rank) -> None:
    """Open a second connection to the test's process, and execute the requests for ``abort`` that come on it.

    This function runs in a second thread, because ``abort`` must work while the main thread is blocked in a call of the
    transport.
    """
    line = _connect(path)
    line.say("abort", os.getpid())
    while True:
        try:
            (number,) = line.hear()
        except (EOFError, OSError):
            os._exit(0)
        _answer(line, rank.transports[number].abort)


def _answer(line: MessageLine, do: Any) -> None:
    try:
        result = do()
    except Exception as error:
        line.say("error", type(error).__name__, str(error))
    else:
        line.say("result", result)


def _connect(path: str) -> MessageLine:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return MessageLine(connection)


if __name__ == "__main__":
    main(*sys.argv[1:])
