"""The launcher's end admits who has the key, survives what makes no sense, and leaves nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddlcore.control import listener
from ddlcore.control.channel import Channel
from ddlcore.control.client import connect, connect_with
from ddlcore.control.credentials import KeyPair, read_job_file
from ddlcore.control.line import FLUSHED, Connection, Line
from ddlcore.control.registration import Registration
from ddlcore.control.server import Server
from ddlcore.errors import DdlInternalError
from ddlcore.messages.coding import encode
from ddlcore.messages.observing import Observation, ReplayStatus, Stack
from ddlcore.messages.spec import PROTOCOL, Ask
from ddlcore.messages.store import StoreAdd, StoreGet, StoreReply, StoreSet
from ddlcore.messages.to_coordinator import Arrive, Bye, Done, Frozen, Hello, Leave, Paused, Request
from ddlcore.messages.to_rank import Answer, Arrivals, Refused, Welcome
from ddlcore.plug.settings import settings_of
from ddlcore.process.build import build_sessions
from tests.control.echo import PATIENCE_S, EchoCoordinator, Net, greet, hello, request


def listen(channel: Channel) -> None:
    """Receives until something is wrong, for at most 10 s."""
    for _ in range(100):
        channel.receive(0.1)


def still_works(net: Net) -> None:
    """A good rank gets in and is answered, by coordinator and store."""
    channel, store = net.join(0)
    channel.send(request(1))
    assert channel.receive(PATIENCE_S) == [Answer(0, 1, ())]
    store.set("key", b"value")
    assert store.get("key", 0.0) == b"value"
    assert {rank for rank, _ in net.coordinator.heard} == {0}


@pytest.mark.parametrize("wrong", ["client", "server"])
def test_wrong_keys_are_turned_away(served: Net, wrong: str) -> None:
    """Who comes with other keys than the job's is told so in one line, and nothing it sends is heard."""
    other = KeyPair()
    access = read_job_file(served.server.job_file)
    if wrong == "client":
        access = msgspec.structs.replace(access, client_public=other.public, client_secret=other.secret)
    else:
        access = msgspec.structs.replace(access, server_public=other.public)
    channel, store = connect_with(access, 1)
    try:
        channel.send(hello(1))
        with pytest.raises(DdlInternalError, match=r"^the launcher .*$"):
            listen(channel)
    finally:
        channel.close()
        store.close()
    still_works(served)
    assert served.server.dropped == 0


def test_no_keys_no_entry(served: Net) -> None:
    """A plain ZeroMQ connection is cut off before a message of it is heard."""
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, b"c1.00000000")
    stranger.linger = 0
    events = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    stranger.connect(served.server.endpoint)
    stranger.send(encode(hello(1)))
    assert events.poll(10_000)
    still_works(served)
    context.destroy(0)


def test_noise_changes_nothing() -> None:
    """Bytes that are no ZeroMQ at all, to a TCP port, in front of and during the work of good ranks."""
    net = Net("tcp")
    try:
        host, port = net.server.endpoint.removeprefix("tcp://").split(":")
        noises = [
            b"GET / HTTP/1.0\r\n\r\n",
            b"\xff" * 64,
            b"\0" * 4096,
            b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE",
            os.urandom(3000),
        ]
        sockets = []
        for noise in noises:
            plain = socket.create_connection((host, int(port)))
            plain.sendall(noise)
            sockets.append(plain)
        still_works(net)
        for plain in sockets:
            plain.close()
        still_works(net)
        assert (net.reports, net.server.dropped) == ([], 0)
    finally:
        net.close()


@pytest.mark.parametrize("kind", ["c", "s"])
def test_unreadable_messages_are_dropped(served: Net, kind: str) -> None:
    """Of a rank that was let in, too: counted, reported once with its rank, and the same line goes on."""
    nonsense = [
        b"\xc1",
        b"\x93\xa2\xff\xff\x00",
        b"\0" * 100,
        b"\x93\xa5hello",
        encode(Welcome("wrong way")),
        os.urandom(50),
    ]
    line = Line(Connection(read_job_file(served.server.job_file), 1), kind)
    try:
        for data in nonsense:
            line.send(data)
        line.send(FLUSHED)
        assert line.receive(PATIENCE_S) == [FLUSHED]
    finally:
        line.close()
    assert served.server.dropped == len(nonsense)
    assert len(served.reports) == 1
    assert "from rank 1 that cannot be read" in served.reports[0]
    still_works(served)


@pytest.mark.parametrize("name", ["c2", "c-1", "x0", "c00", "c99999999999"])
def test_names_that_are_no_ranks_are_dropped(served: Net, name: str) -> None:
    """A connection with the job's key but no rank of it is not heard."""
    connection = Connection(read_job_file(served.server.job_file), 0)
    connection.rank = name[1:]  # type: ignore[assignment]  # wrong on purpose
    line = Line(connection, name[0])
    try:
        line.send(encode(hello(0)))
        assert served.reported.wait(PATIENCE_S)
    finally:
        line.close()
    assert "no rank's" in served.reports[0]
    still_works(served)


def test_what_is_out_of_place_is_dropped(served: Net) -> None:
    """The coordinator's DdlInternalError costs the message only."""
    channel, _ = served.join(0)
    channel.send(request(13))
    channel.send(request(14))
    assert channel.receive(PATIENCE_S) == [Answer(0, 14, ())]
    assert served.server.dropped == 1
    assert "rank 0 that is out of place (thirteen)" in served.reports[0]


def test_a_broken_brain_is_seen_by_all(served: Net) -> None:
    """A bug in the coordinator is reported, and ends the ranks' wait instead of leaving them in silence."""
    (first, _), (second, _) = served.join(0), served.join(1)
    first.send(request(666))
    for channel in (first, second):
        with pytest.raises(DdlInternalError, match="the launcher is gone"):
            listen(channel)
    assert served.reported.wait(PATIENCE_S)
    assert "ZeroDivisionError: a bug of the coordinator" in served.reports[0]


def test_a_rank_that_does_not_read_holds_nobody_up() -> None:
    """Answers to it pile up; those to others come at once."""
    net = Net("ipc", coordinator=EchoCoordinator(flood=2000))
    try:
        (first, _), (idle, _) = net.join(0), net.join(1)
        for serial in range(20, 30):
            start = time.monotonic()
            first.send(request(serial))
            assert first.receive(PATIENCE_S) == [Answer(0, serial, ())]
            assert time.monotonic() - start < 20.0
        arrived = 0
        while arrived < 20_000:
            messages = idle.receive(PATIENCE_S)
            assert messages
            arrived += len(messages)
    finally:
        net.close()


def test_close_ends_the_waits_of_ranks(served: Net) -> None:
    """Ranks that are still there see the launcher as gone, in their channel and in a call of the store."""
    channel, store = served.join(0)
    errors: list[Exception] = []

    def get() -> None:
        try:
            store.get("never", 60.0)
        except DdlInternalError as error:
            errors.append(error)

    thread = threading.Thread(target=get)
    thread.start()
    time.sleep(0.1)
    served.server.close()
    served.server.close()
    with pytest.raises(DdlInternalError, match="the launcher is gone"):
        channel.receive(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert "the launcher is gone" in str(errors[0])


def test_without_abstract_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on Linux the endpoint is a socket in a folder of this user's, which goes with the server."""

    def none() -> None:
        raise OSError("this system has no /proc")

    monkeypatch.setattr(listener, "OwnSocket", none)
    monkeypatch.setattr(listener, "_ABSTRACT", False)
    net = Net("ipc")
    path = Path(net.server.endpoint.removeprefix("ipc://"))
    try:
        assert path.is_socket()
        assert path.parent.stat().st_mode & 0o777 == 0o700
        still_works(net)
    finally:
        net.close()
    assert not path.parent.exists()


def test_a_server_that_never_started_closes() -> None:
    """Nothing waits for the thread that was not there."""
    server = Server(1, EchoCoordinator())
    start = time.monotonic()
    server.close()
    assert time.monotonic() - start < 20.0
    assert not Path(server.job_file).exists()


def test_a_port_in_use_is_one_clear_line() -> None:
    """It names the address and says what next."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DdlInternalError, match=rf"^control network: {address} is in use; choose another port.*$"):
            Server(1, EchoCoordinator(), address)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "tcp://nowhere.invalid:0", "tcp://127.0.0.1", "udp://127.0.0.1:0"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    """ValueError repeats it."""
    with pytest.raises(ValueError, match=rf"^control network: .*{address}"):
        Server(1, EchoCoordinator(), address)


def test_two_jobs_do_not_mix() -> None:
    """Servers of one process have their own endpoints and keys: a rank of one is no rank of the other."""
    first, second = Net("ipc"), Net("ipc")
    try:
        one, other = read_job_file(first.server.job_file), read_job_file(second.server.job_file)
        channel, store = connect_with(msgspec.structs.replace(one, endpoint=other.endpoint), 0)
        channel.send(hello(0))
        with pytest.raises(DdlInternalError, match="the launcher"):
            listen(channel)
        channel.close()
        store.close()
        still_works(first)
        still_works(second)
    finally:
        first.close()
        second.close()


def test_many_ranks_at_once() -> None:
    """64 connections that come together are all welcomed."""
    net = Net("ipc", size=64)
    try:
        lines = [net.join(rank, greeting=False)[0] for rank in range(64)]
        for rank, channel in enumerate(lines):
            assert greet(channel, rank) == [Welcome(f"for {rank}")]
    finally:
        net.close()


def test_who_is_refused_does_not_take_a_ranks_line() -> None:
    """Another process of the same rank hears why; what the rank is told next still reaches the rank."""
    server = Server(2, Registration(2, EchoCoordinator(), lambda rank, one: None), "tcp://127.0.0.1:0")
    server.start()
    lines = [connect(server.job_file, rank) for rank in (1, 1, 0)]
    (ours, _), (stranger, _), (other, _) = lines
    ask = Arrive("ours", (0, 1), "here", "kin", 1, patient=False)
    try:
        ours.send(ask)
        assert isinstance(ours.receive(PATIENCE_S)[0], Arrivals)  # it is there
        ours.send(msgspec.structs.replace(ask, patient=True))
        stranger.send(msgspec.structs.replace(ask, token="stranger"))
        assert isinstance(stranger.receive(PATIENCE_S)[0], Refused)
        other.send(msgspec.structs.replace(ask, token="other", patient=True))
        assert isinstance(ours.receive(PATIENCE_S)[0], Arrivals)
        assert stranger.receive(0.0) == []
    finally:
        for channel, store in lines:
            channel.close()
            store.close()
        server.close()


HUGE = 2**63 - 1
RECORDS = [
    encode(record)
    for record in (
        Hello(0, (0, 1), 1, PROTOCOL, "0", 0),
        Hello(7, (7, -1, HUGE), -1, PROTOCOL, "0", HUGE),
        Hello(1, (), 0, 99, "", -1),
        Arrive("token", (HUGE, -1), "h", "k", -1),
        Request(0, 1, (Ask(0, "x", b"\xc1"),)),
        Request(HUGE, -HUGE, (Ask(-5, "", b"", (-1, HUGE), HUGE, b"x"),) * 3),
        Leave(HUGE, "why", True),
        Frozen(-1, ((HUGE, -HUGE), (0, 0))),
        ReplayStatus(-1, HUGE, True, -7, ("x",), ("y",), True, True),
        Paused(HUGE, (-1,)),
        Observation("\0", b"\xc1" * 100),
        Stack("\0" * 100),
        Bye("why", True),
        Done(),
        StoreGet(1, "nothing", float("nan")),
        StoreGet(2, "nothing", float("inf")),
        StoreGet(3, "nothing", -1e308),
        StoreAdd(4, "count", HUGE),
        StoreSet(5, "count", b"9" * 5000),
        StoreSet(HUGE, "", b""),
        Welcome("wrong way"),
    )
]
HOSTILE_FRAMES = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.builds(lambda size: b"\xdd" + size.to_bytes(4, "big"), st.integers(0, 2**32 - 1)),  # a list of so many
        st.builds(lambda size: b"\xc6" + size.to_bytes(4, "big") + b"x", st.integers(0, 2**32 - 1)),  # so many bytes
        st.builds(lambda depth: b"\x91" * depth, st.integers(1, 5000)),  # lists within lists
        st.builds(lambda data, cut: data[:cut], st.sampled_from(RECORDS), st.integers(0, 40)),  # cut short
        st.sampled_from(RECORDS),  # whole, again and again, and out of place
    ),
    max_size=20,
)


@pytest.fixture(scope="module")
def long_lived() -> Iterator[Server]:
    """One server for all examples: what one of them leaves behind is there for the next."""
    server = Server(2, build_sessions(2, *settings_of({})), report=lambda text: None)
    server.start()
    yield server
    server.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from("cs"), rank=st.integers(0, 3), frames=HOSTILE_FRAMES)
def test_nothing_that_arrives_ends_the_server(long_lived: Server, kind: str, rank: int, frames: list[bytes]) -> None:
    """Any bytes and any records out of place, of one who has the key: the coordinator that decides goes on, and answers others."""
    line = Line(Connection(read_job_file(long_lived.job_file), rank), kind)
    other = Line(Connection(read_job_file(long_lived.job_file), 0), "s")
    try:
        for data in frames:
            line.send(data)
        if rank < 2:
            line.send(FLUSHED)
            deadline_s = time.monotonic() + PATIENCE_S
            while FLUSHED not in line.receive(PATIENCE_S):
                assert time.monotonic() < deadline_s
        other.send(encode(StoreSet(7, "key", b"value")))
        assert other.receive(PATIENCE_S) == [encode(StoreReply(7, b""))]
    finally:
        line.broken = line.broken or "the test is over"  # closing it does not wait
        line.close()
        other.close()
