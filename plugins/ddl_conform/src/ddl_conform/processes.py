"""The transport suite with one process for each rank.

This suite is for transports that cannot have two ranks in one process, or whose ranks a launcher must start. The tests
are the same as in TransportSuite, and run in one process, the test's process. There, each rank has a substitute
transport. A substitute passes each call, together with the bytes of the buffers, to the real transport in another
process, and writes the bytes that come back into the buffers. Prepared plans cannot be passed on, because plans contain
addresses, which mean nothing in another process. So this suite does not test the capability ``vectored``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest

from ddl_conform.process_rank import MessageLine, named
from ddl_conform.transports import TransportSuite
from ddlcore import errors
from ddlcore.contracts.store import Store
from ddlcore.contracts.transport import Capabilities, Context, Transport, Work
from ddlcore.types import Buffer, ReduceOp

__all__ = ["ProcessSuite", "RankProcesses"]

START_S = 120.0
END_S = 20.0
_TARGET = 'target = "module:Class" of the transport, which each process imports'
T = TypeVar("T")


class RankProcesses:
    """A set of ``size`` processes. Each process can be one rank in any number of groups (communicators)."""

    def __init__(
        self,
        size: int,
        target: str,
        command: Callable[[Sequence[str], int], Sequence[str]],
        environ: Mapping[str, str],
        first: str = "",
    ) -> None:
        """Start the processes, and wait until all of them have connected.

        ``command(program, size)`` returns the command that runs ``program`` in ``size`` processes. ``target`` names the
        transport as "module:Class". ``environ`` is the environment of the command. ``first`` names a function as
        "module:function", which every process calls first; "" means none. Raises AssertionError if the processes have
        not connected after 120 s.
        """
        self._folder = tempfile.mkdtemp(prefix="ddl-")  # mode 0700: no other user can connect
        self._target = target
        self._numbers = itertools.count()
        self._listener = socket.socket(socket.AF_UNIX)
        path = os.path.join(self._folder, "socket")
        self._listener.bind(path)
        self._listener.listen(3 * size)
        self._listener.settimeout(START_S)
        program = [sys.executable, "-m", "ddl_conform.process_rank", path, target, first]
        with open(os.path.join(self._folder, "output"), "wb") as output:
            self._process = subprocess.Popen(
                list(command(program, size)),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._connections: list[socket.socket] = []
        try:
            self.ranks = self._meet(size)
        except BaseException:
            self.close()
            raise

    def _meet(self, size: int) -> list[_RankProcess]:
        lines: dict[tuple[str, int], MessageLine] = {}
        until_s = time.monotonic() + START_S
        while len(lines) < 3 * size:
            self._listener.settimeout(0.2)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                late = time.monotonic() > until_s
                assert self._process.poll() is None and not late, f"the rank processes did not come\n{self.output()}"
                continue
            self._connections.append(connection)
            line = MessageLine(connection)
            word, pid = line.hear()
            lines[word, pid] = line
        self.pids: list[int] = [pid for word, pid in lines if word == "rank"]
        return [_RankProcess(*(lines[word, pid] for word in ("rank", "abort", "store"))) for pid in self.pids]

    def transports(self, size: int) -> list[Transport]:
        """Return ``size`` new transports. Each one passes its calls to a new real transport in another process."""
        known: Capabilities = named(self._target).capabilities
        # Another process cannot use tables of pointers.
        capabilities = replace(
            known, vectored=False, scales=False, atomic=False, resumable=False, resumable_moves=False
        )
        return [_DistantTransport(rank, next(self._numbers), capabilities) for rank in self.ranks[:size]]

    def belongings(self) -> dict[str, set[str]]:
        """Return the names of the threads, file descriptors and shared memory of all processes, by kind."""
        held: dict[str, set[str]] = {}
        for index, rank in enumerate(self.ranks):
            for kind, names in rank.ask("belongings").items():
                held.setdefault(kind, set()).update(f"process {index}: {name}" for name in names)
        return held

    def output(self) -> str:
        """Return the text that all processes together have written to stdout and stderr."""
        with open(os.path.join(self._folder, "output"), errors="replace") as file:
            return file.read()

    def close(self) -> None:
        """Close all connections, so that the processes end. Kill the processes that have not ended after 20 s."""
        for connection in self._connections:
            connection.close()
        self._listener.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)


class _RankProcess:
    """The three connections to the process of one rank.

    One connection is for calls, one for aborts, and one for the requests that the process sends to the store.
    """

    def __init__(self, line: MessageLine, abort_line: MessageLine, store_line: MessageLine) -> None:
        self._line = line
        self._abort_line = abort_line
        self._store_line = store_line
        self._abort_lock = threading.Lock()
        self.store: Store | None = None  # of the transport that was opened last
        threading.Thread(target=self._serve, name="store of a rank process", daemon=True).start()

    def ask(self, verb: str, *arguments: object) -> Any:
        """Call the method ``verb`` in the process, and return its result. Raise the error that the method raises.

        Only the thread of the rank may call this.
        """
        self._line.say(verb, *arguments)
        return _result(self._line.hear())

    def _serve(self) -> None:
        """Answer the requests that the process sends to the store, until the connection ends.

        These requests have a connection and a thread of their own. The reason: a thread of the transport may still send
        a request after ``open`` was aborted, and the answer must not be mistaken for the answer to the next call.
        """
        with suppress(EOFError, OSError):
            while True:
                words = self._store_line.hear()
                assert self.store is not None, "the store was asked before open"
                self._store_line.say(*_answer(self.store, *words))

    def abort(self, number: int) -> None:
        """Abort the transport ``number`` of the process. Any thread may call this."""
        # Aborts have a connection of their own: the connection for calls is busy while the rank's thread waits for the
        # answer to a blocking call, and it is this call that the abort must end.
        with self._abort_lock:
            self._abort_line.say(number)
            _result(self._abort_line.hear())


def _answer(store: Store, verb: str, *arguments: Any) -> tuple[bool, object]:
    try:
        return False, getattr(store, verb)(*arguments)
    except Exception as error:  # the store of a test that has ended may raise anything; the process must get an answer
        return True, str(error)


def _result(words: list[Any]) -> Any:
    if words[0] == "result":
        return words[1]
    _, name, text = words
    if name == "PeerLost":
        raise errors.TransportError(text)
    kind = getattr(errors, name, None) or {"AssertionError": AssertionError, "ValueError": ValueError}.get(name)
    raise kind(text) if kind is not None else RuntimeError(f"{name}: {text}")


class _DistantTransport(Transport):
    """A substitute for the transport of one rank, which passes its calls to the real transport in the rank's process.

    ``number`` is the number of the real transport in that process.
    """

    def __init__(self, rank: _RankProcess, number: int, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self._rank = rank
        self._number = number
        rank.ask("make", number)

    def open(self, context: Context) -> None:
        super().open(context)
        members = [[member.rank, member.host] for member in context.members]
        facts = (context.rank, members, dict(context.settings), context.timeout_s, context.name)
        self._rank.store = context.store
        self._rank.ask("open", self._number, *facts)

    def close(self) -> None:
        self._rank.ask("close", self._number)

    def abort(self) -> None:
        self._rank.abort(self._number)

    def _call(self, verb: str, buffers: Sequence[Buffer], *rest: object) -> Work:
        places: dict[int, int] = {}  # address -> index in ``memory``
        memory: list[tuple[int, bytes]] = []
        described = []
        for buffer in buffers:
            if buffer.address not in places or not buffer.nbytes:
                places[buffer.address] = len(memory)
                memory.append((buffer.address, ctypes.string_at(buffer.address, buffer.nbytes)))
            described.append((places[buffer.address], buffer.count, int(buffer.dtype), buffer.shape, buffer.strides))
        self._rank.ask("call", self._number, verb, memory, described, list(rest))
        return _DistantWork(self._rank, self._number, [(address, len(content)) for address, content in memory])

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        return self._call("allreduce", (source, target), int(op))

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        return self._call("allgatherv", (source, target), list(counts))

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        return self._call("broadcast", (buffer,), root)

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        return self._call("reducescatterv", (source, target), list(counts), int(op))

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        return self._call("alltoallv", (source, target), [list(row) for row in counts])

    def barrier(self) -> Work:
        return self._call("barrier", ())


class _DistantWork(Work):
    def __init__(self, rank: _RankProcess, number: int, memory: list[tuple[int, int]]) -> None:
        self._rank = rank
        self._number = number
        self._memory = memory
        self._complete = False

    def wait(self, timeout_s: float) -> bool:
        if self._complete:
            return True
        contents = self._rank.ask("wait", self._number, timeout_s)
        if contents is None:
            return False
        self._complete = True
        for (address, nbytes), content in zip(self._memory, contents):
            ctypes.memmove(address, content, nbytes)
        return True


class ProcessSuite(TransportSuite):
    """The transport suite with one process for each rank.

    A subclass sets ``target``, and overrides ``command`` if a launcher must start the processes. It does not override
    ``make``: the transports that this suite makes pass their calls to the processes.

    >>> class TestMine(ProcessSuite):
    ...     target = "my_transport:MyTransport"
    ...
    ...     @classmethod
    ...     def command(cls, program, size):
    ...         return ["mpiexec", "-n", str(size), *program]
    """

    target: ClassVar[str] = ""  # "module:Class" of the transport
    first: ClassVar[str] = ""  # "module:function" that every process calls first
    processes: ClassVar[RankProcesses]

    @classmethod
    def command(cls, program: Sequence[str], size: int) -> Sequence[str]:
        """Return the command that runs ``program`` in ``size`` processes."""
        return ["sh", "-c", 'n=$1; shift; for i in $(seq $n); do "$@" & done; wait', "ranks", str(size), *program]

    @classmethod
    def environ(cls) -> Mapping[str, str]:
        """Return the environment of the processes: a copy of the environment of this process.

        PYTHONPATH is set to the module search path of this process, so that the processes find the same modules.
        """
        return _with_paths(os.environ)

    @classmethod
    def setup_class(cls) -> None:
        if cls.make is not ProcessSuite.make:
            pytest.fail(f"{cls.__name__} overrides make(); remove it and set target: {_TARGET}", pytrace=False)
        if not cls.target:
            pytest.fail(f"{cls.__name__} has no target; set it: {_TARGET}", pytrace=False)
        cls.processes = RankProcesses(max(cls.sizes), cls.target, cls.command, cls.environ(), cls.first)
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        try:
            super().teardown_class()
        finally:
            cls.processes.close()

    def make(self, size: int) -> Sequence[Transport]:
        return self.processes.transports(size)

    def belongings(self) -> dict[str, set[str]]:
        return self.processes.belongings()


def _with_paths(environ: Mapping[str, str]) -> dict[str, str]:
    return {**environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
