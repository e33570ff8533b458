"""A group's connections, and only they, are found among all connections of the process."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from ddl_gloo.wires import Wires

from ddlcore.contracts.transport import Transport
from ddlcore.types import ReduceOp
from plugins.ddl_gloo.tests.worlds import buffer, call, ones, open_group


def test_a_strangers_connection_is_left_alone() -> None:
    """A user's own socket to the same host, and another group's connections, survive an abort."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()
        with theirs, open_group(3) as group, open_group(2) as other:
            for transport in group.transports:
                assert len(transport._wires) >= 2  # type: ignore[attr-defined]  # what it is about
                transport.abort()
            mine.sendall(b"still here")
            assert theirs.recv(100) == b"still here"
            other.run(call(lambda rank, transport: transport.barrier()))


def test_descriptors_are_not_inherited() -> None:
    """A program that a rank starts inherits none of the connections, because they must not outlive the rank."""
    with open_group(2) as group:
        numbers = list(group.transports[0]._wires._wires)  # type: ignore[attr-defined]  # what it is about
        assert numbers
        assert not any(os.get_inheritable(number) for number in numbers)


def test_nothing_published_finds_nothing() -> None:
    """If nothing was published, no connection is taken for the group's."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        wires = Wires([], [])
        assert len(wires) == 0
        wires.cut()


def test_a_descriptor_of_a_path_is_no_connection(tmp_path: Path) -> None:
    """A descriptor of a Unix socket's path (O_PATH) is ignored.

    Its status says that it is a socket, but it cannot be used as one.
    """
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        place = os.open(tmp_path / "socket", os.O_PATH)
        try:
            assert len(Wires([b""], [b""])) == 0
        finally:
            os.close(place)


def test_a_number_that_is_anothers_by_now() -> None:
    """If Gloo has closed a connection itself, abort does not touch the file that has its number now."""
    with open_group(2) as group:
        wires = group.transports[0]._wires  # type: ignore[attr-defined]  # what it is about
        group.run(lambda rank, transport: transport.close())
        one, other = socket.socketpair()
        with (
            one,
            other,
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as mine,
        ):
            wires._wires = dict.fromkeys((one.fileno(), server.fileno(), mine.fileno()), 1)
            wires.cut()
            mine.sendall(b"whole")
            one.sendall(b"whole")
            assert wires.held() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_takes_no_part(capfd: pytest.CaptureFixture[str]) -> None:
    """A forked child can exit and holds no connection; the parent's group still works, also after the child's exit."""

    def play(rank: int, transport: Transport) -> None:
        array = ones(400_000)
        call(lambda r, t: t.allreduce(buffer(array), buffer(array), ReduceOp.Sum))(rank, transport)
        assert (array == 2).all()

    with open_group(2) as group:
        group.run(play)
        inodes = {inode for t in group.transports for inode in t._wires._wires.values()}  # type: ignore[attr-defined]
        child = os.fork()
        if child == 0:
            code = 3
            try:
                held = {os.fstat(int(n)).st_ino for n in os.listdir("/proc/self/fd") if os.path.exists(f"/dev/fd/{n}")}
                for transport in group.transports:
                    transport.abort()
                    transport.close()
                code = 0 if not held & inodes else 4
            finally:
                os._exit(code)
        until_s = time.monotonic() + 10
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until_s:
            time.sleep(0.01)
        if done == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(done[1]) == 0, capfd.readouterr().err
        group.run(play)


def test_calm_waits_for_what_is_on_its_way() -> None:
    """calm() waits while bytes are on their way, but no longer than its limit, and returns soon if there are none."""
    with open_group(2) as group:
        wires = group.transports[0]._wires  # type: ignore[attr-defined]  # what it is about
        begun_s = time.monotonic()
        wires.calm(60.0)
        assert time.monotonic() - begun_s < 20.0
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
            theirs, _ = server.accept()
            with theirs:
                wires._wires = {mine.fileno(): os.fstat(mine.fileno()).st_ino}
                theirs.sendall(b"unread")
                begun_s = time.monotonic()
                wires.calm(0.1)
                assert time.monotonic() - begun_s >= 0.1
                assert mine.recv(100) == b"unread"
                begun_s = time.monotonic()
                wires.calm(60.0)
                assert time.monotonic() - begun_s < 20.0
