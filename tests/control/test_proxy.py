"""What stands before a TCP port: who shows no key is not kept for long, not kept in numbers, and not heard at length."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from ddlcore.control import line, proxy
from ddlcore.control.channel import Channel
from ddlcore.control.client import connect_with
from ddlcore.control.credentials import KeyPair, read_job_file
from ddlcore.control.line import Refusals
from ddlcore.control.listening import OwnSocket, tcp_listener, tcp_name
from ddlcore.control.peers import is_ours, local_tcp_uid
from ddlcore.control.server import Server
from ddlcore.errors import DdlInternalError
from ddlcore.messages.to_rank import Welcome
from tests.control.echo import PATIENCE_S, Net, greet, hello

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE".ljust(64, b"\0")
BUSY_MS = 10_000  # for so long, a thread may hold the interpreter lock, as while it loads a large library
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel who is at the other end")


@pytest.fixture
def net() -> Iterator[Net]:
    """Two ranks by TCP."""
    made = Net("tcp")
    yield made
    made.close()


def probe(server: Server, *said: bytes) -> socket.socket:
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    for data in said:
        made.sendall(data)
    return made


def listen(channel: Channel) -> None:
    for _ in range(100):
        channel.receive(0.1)


def ends(connection: socket.socket) -> bool:
    """Whether the other side ends it, within the patience of a test."""
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    "said", [b"", GREETING[:5], GREETING, b"GET / HTTP/1.0\r\n\r\n"], ids=["nothing", "a part", "a greeting", "HTTP"]
)
def test_who_shows_no_key_is_ended(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """However far it came, when its time is over; a rank that is let in stays."""
    monkeypatch.setattr(proxy, "HANDSHAKE_S", 0.5)
    net = Net("tcp")
    try:
        channel, _ = net.join(0)
        with probe(net.server, said) as stranger:
            assert ends(stranger)
        assert greet(channel, 0) == [Welcome("for 0")]
    finally:
        net.close()


def test_a_handshake_that_is_too_long_is_cut(net: Net) -> None:
    """What is announced before a key was shown is not read: after two KiB it is over."""
    sent = 0
    with probe(net.server, GREETING) as stranger, contextlib.suppress(ConnectionError):
        for _ in range(1000):
            sent += stranger.send(b"\x06" + (60 << 20).to_bytes(8, "big") + b"x" * (1 << 16))
            time.sleep(0.01)
    assert sent < 32 << 20  # what stands in the kernel's buffers, and no more
    assert net.join(0)


def test_the_worst_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many without a key: who has said nothing, before who has begun."""
    monkeypatch.setattr(proxy.TcpProxy, "_room", lambda self: 4)
    net = Net("tcp")
    try:
        begun = probe(net.server, GREETING)
        assert begun.recv(1)  # it leads on to libzmq, which answers
        silent = [probe(net.server) for _ in range(12)]
        assert all(ends(one) for one in silent[:9])
        begun.settimeout(0.2)
        assert not ends(begun)
        assert net.join(0)
        for one in (begun, *silent):
            one.close()
    finally:
        net.close()


def test_many_strangers_are_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hundred are worth one, the first thousand the next."""
    net = Net("tcp")
    try:
        for _ in range(150):
            with probe(net.server, b"GET / HTTP/1.0\r\n\r\n") as stranger:
                assert ends(stranger)
        assert net.reported.wait(PATIENCE_S)
        assert len(net.reports) == 1
        assert "TCP connections that showed no key of this job; the job goes on" in net.reports[0]
    finally:
        net.close()


def test_large_messages_pass_whole(net: Net) -> None:
    """Of those that were let in, both ways, more than any buffer on the way holds."""
    _, store = net.join(0)
    value = os.urandom(8 << 20)
    store.set("large", value)
    assert store.get("large", 5.0) == value


def test_a_refused_key_is_told_of_behind_the_port_too(net: Net) -> None:
    """What libzmq answers comes through."""
    other = KeyPair()
    access = msgspec.structs.replace(
        read_job_file(net.server.job_file), client_public=other.public, client_secret=other.secret
    )
    channel, store = connect_with(access, 1)
    try:
        channel.send(hello(1))
        with pytest.raises(DdlInternalError, match="does not admit this rank"):
            listen(channel)
    finally:
        channel.close()
        store.close()


def tcp_sockets(port: int) -> dict[str, list[socket.socket]]:
    """Return duplicates of this process's sockets that are connected to ``port`` ("rank"), or by it ("coordinator")."""
    found: dict[str, list[socket.socket]] = {"rank": [], "coordinator": []}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is no socket that is connected
            one = socket.socket(fileno=os.dup(int(name)))
            peer = one.getpeername() if one.family == socket.AF_INET else None
            if peer is not None and port in (peer[1], one.getsockname()[1]):
                found["rank" if peer[1] == port else "coordinator"].append(one)
            else:
                one.close()
    return found


@LINUX
def test_both_ends_of_a_connection_notice_that_the_other_host_is_gone(net: Net) -> None:
    """The kernel sends probes, and ends a connection whose data is not acknowledged; a rank may wait longer for that."""
    _, store = net.join(0)
    store.set("key", b"value")
    assert store.get("key", PATIENCE_S) == b"value"
    found = tcp_sockets(int(net.server.endpoint.rpartition(":")[2]))
    patience_ms = {"rank": line.UNREAD_MS, "coordinator": line.UNANSWERED_MS}
    tcp, probes = socket.IPPROTO_TCP, line.KEEPALIVE_PROBES
    try:
        for end, sockets in found.items():
            assert len(sockets) == 2, "the channel and the store"
            for one in sockets:
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                assert [one.getsockopt(tcp, name) for name in names] == [line.KEEPALIVE_S, line.KEEPALIVE_S, probes]
                assert one.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == patience_ms[end], end
    finally:
        for one in (*found["rank"], *found["coordinator"]):
            one.close()


def test_heartbeats_find_a_process_that_is_stopped() -> None:
    """Its host still answers, so the kernel's probes do not find it. A process that holds its interpreter lock is no loss."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as one:
        line.keep_alive(one)
        assert one.getsockopt(zmq.HEARTBEAT_IVL) == line.HEARTBEAT_MS > 0
        assert one.getsockopt(zmq.HEARTBEAT_TIMEOUT) == line.HEARTBEAT_TIMEOUT_MS
    assert line.HEARTBEAT_TIMEOUT_MS > line.UNREAD_MS > line.UNANSWERED_MS > 1000 * line.KEEPALIVE_S
    assert line.UNREAD_MS > BUSY_MS


def test_a_rank_that_was_turned_away_in_a_crowd_comes_again() -> None:
    """Its connection is ended twice before it could show a key; what it had said arrives all the same."""
    net = Net("tcp")
    with socket.create_server(("127.0.0.1", 0)) as crowd:
        access = read_job_file(net.server.job_file)
        port = crowd.getsockname()[1]
        channel, store = connect_with(msgspec.structs.replace(access, endpoint=f"tcp://127.0.0.1:{port}"), 0)
        try:
            channel.send(hello(0))
            crowd.settimeout(PATIENCE_S)
            for _ in range(2):
                crowd.accept()[0].close()
            assert channel.receive(0.2) == []  # and it does not take that for the end
        finally:
            channel.close()
            store.close()
            net.close()


def test_refusals_end() -> None:
    """By TCP some are forgiven, until the server was heard; a wrong key and a Unix socket never are."""
    refusals = Refusals("tcp://127.0.0.1:1")
    forgiven = [refusals.forgive(zmq.EVENT_DISCONNECTED) for _ in range(20)]
    assert 0 < sum(forgiven) < 20
    assert forgiven == sorted(forgiven, reverse=True)
    heard = Refusals("tcp://127.0.0.1:1")
    heard.heard()
    assert not heard.forgive(zmq.EVENT_DISCONNECTED)
    assert not Refusals("tcp://127.0.0.1:1").forgive(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    assert not Refusals("ipc:///nowhere").forgive(zmq.EVENT_DISCONNECTED)


@LINUX
def test_the_kernel_tells_who_connects() -> None:
    """On this host, by TCP over IPv4: ourselves."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        assert local_tcp_uid(accepted) == local_tcp_uid(client) == os.geteuid()
    assert is_ours(os.geteuid()) and is_ours(0) and not is_ours(-1)


@LINUX
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_the_kernel_tells_who_connects_to_all_addresses() -> None:
    """An IPv4 client of a server for both families is found as what it is."""
    listener = tcp_listener("tcp://[::]:0")
    with listener:
        port = int(tcp_name(listener).rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0] as accepted:
            assert local_tcp_uid(accepted) == os.geteuid()


@LINUX
def test_a_socket_of_our_own_leaves_nothing(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, not even while it is used; who knows its path gets there, until it is closed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    own = OwnSocket()
    with own.socket:
        assert os.listdir(str(tmp_path)) == []
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(own.path)
        own.close()
        with socket.socket(socket.AF_UNIX) as client, pytest.raises((FileNotFoundError, ConnectionRefusedError)):
            client.connect(own.path)
