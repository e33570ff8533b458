"""Ranks behind an agent are served as those beside the launcher; silence and broken connections are told apart from peace."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from ddlcore.control.beats import BEAT_S, Beats
from ddlcore.control.channel import Channel
from ddlcore.control.client import connect
from ddlcore.control.credentials import KeyPair
from ddlcore.control.relay import Relay
from ddlcore.control.server import Server
from ddlcore.control.store import JobStore
from ddlcore.errors import DdlInternalError
from ddlcore.messages.coding import encode
from ddlcore.messages.elastic import CoordinatorLost
from ddlcore.messages.to_rank import Answer, Lost, Welcome
from tests.control.echo import PATIENCE_S, EchoCoordinator, greet, hello, request

SILENCE_S = 1.6  # where a test waits for the end of somebody who is silent
PEACE_S = 8.0  # where nobody may be taken for silent: a beat comes once a second, and a busy machine delays it


# --- the book of beats


def test_all_are_due_once_in_a_while() -> None:
    """Who was heard of gets a beat, once a second."""
    beats: Beats[str] = Beats(3.0)
    assert (beats.due(10.0), beats.deadline_s()) == ([], None)
    beats.heard("a", 10.0)
    beats.heard("b", 10.1)
    assert sorted(beats.due(10.0 + BEAT_S)) == ["a", "b"]
    assert beats.due(10.5 + BEAT_S) == []
    assert beats.deadline_s() == 10.0 + 2 * BEAT_S


def test_the_silent_are_told_once() -> None:
    """After so long without a word, and never again; who took its leave is not missed."""
    beats: Beats[str] = Beats(3.0)
    for who in "abc":
        beats.heard(who, 0.0)
    beats.heard("a", 2.0)
    beats.forget("c")
    assert beats.silent(2.9) == []
    assert beats.silent(3.0) == ["b"]
    assert beats.silent(4.0) == []
    assert beats.silent(5.0) == ["a"]


def test_what_cannot_be_followed_ends_an_agent() -> None:
    """It would wait for ever else, and its ranks with it."""
    side = Side("")
    parted = threading.Event()

    def hear(data: bytes) -> None:
        raise MemoryError("no room")

    access = side.server.agent_access(side.server.agents_endpoint)
    relay = Relay(access, 0, heard=hear, gone=lambda reason: parted.set(), silence_s=PEACE_S)
    side.relays.append(relay)
    relay.start()
    relay.say(b"here")
    side.until(lambda: (0, b"here") in side.told)
    side.server.tell(0, b"welcome")
    assert parted.wait(PATIENCE_S)
    side.close()


# --- agents and a server


class Side:
    """A server with what its agents told it, and agents with what they were told."""

    def __init__(self, address: str, silence_s: float = PEACE_S) -> None:
        self.silence_s = silence_s
        self.coordinator = EchoCoordinator()
        self.told: list[tuple[int, bytes]] = []
        self.lost: list[int] = []
        self.changed = threading.Condition()
        self.server = Server(4, self.coordinator, address, agents=self, silence_s=silence_s)
        self.server.start()
        self.relays: list[Relay] = []
        self.words: dict[int, list[bytes]] = {}
        self.ends: dict[int, str] = {}
        self._joined: list[Callable[[], None]] = []

    def heard(self, agent: int, data: bytes) -> None:
        with self.changed:
            self.told.append((agent, data))
            self.changed.notify_all()

    def silent(self, agent: int, silence_s: float) -> None:
        with self.changed:
            self.lost.append(agent)
            self.changed.notify_all()

    def agent(self, index: int, **more: bool) -> Relay:
        """One that has said who it is, and been heard."""
        words = self.words[index] = []

        def hear(data: bytes) -> None:
            with self.changed:
                words.append(data)
                self.changed.notify_all()

        def part(reason: str) -> None:
            with self.changed:
                self.ends[index] = reason
                self.changed.notify_all()

        access = self.server.agent_access(self.server.agents_endpoint)
        relay = Relay(access, index, heard=hear, gone=part, silence_s=self.silence_s, **more)
        self.relays.append(relay)
        relay.start()
        relay.say(b"here")
        self.until(lambda: (index, b"here") in self.told)
        self.server.tell(index, b"welcome")
        self.until(lambda: words == [b"welcome"])
        return relay

    def join(self, relay: Relay, rank: int) -> tuple[Channel, JobStore]:
        channel, store = connect(relay.job_file, rank)
        self._joined += [channel.close, store.close]
        return channel, store

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S)

    def close(self) -> None:
        for close in self._joined:
            close()
        for relay in self.relays:
            relay.close()
        self.server.close()


@pytest.fixture(params=["tcp://127.0.0.1:0", "tcp://[::1]:0", ""])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    made = Side(request.param)
    yield made
    made.close()


@pytest.fixture
def tcp() -> Iterator[Side]:
    made = Side("tcp://127.0.0.1:0")
    yield made
    made.close()


def test_ranks_behind_agents_and_beside_the_launcher(side: Side) -> None:
    """Answers reach the right rank of the right agent, and what one stores another finds."""
    relays = [side.agent(0), side.agent(1)]
    joined = [side.join(relays[0], 0), side.join(relays[0], 1), side.join(relays[1], 2)]
    own, own_store = connect(side.server.job_file, 3)
    try:
        for rank, (channel, _) in enumerate([*joined, (own, own_store)]):
            assert greet(channel, rank) == [Welcome(f"for {rank}")]
            channel.send(request(rank + 1))
            assert channel.receive(PATIENCE_S) == [Answer(0, rank + 1, ())]
        joined[2][1].set("key", b"value")
        assert joined[0][1].get("key", 1.0) == b"value"
        assert own_store.get("key", 1.0) == b"value"
        assert side.server.dropped == 0
    finally:
        own.close()
        own_store.close()


def test_losses_reach_ranks_behind_agents(side: Side) -> None:
    """As soon as the launcher is told."""
    relays = [side.agent(0), side.agent(1)]
    channel, _ = side.join(relays[0], 0)
    other, _ = side.join(relays[1], 2)
    greet(channel, 0)
    greet(other, 2)
    side.server.rank_ended(2, "killed")
    assert channel.receive(PATIENCE_S) == [Lost((2,), "killed")]


def test_last_words_are_not_lost(side: Side, patient_ends: None) -> None:
    """What a rank says before it closes its line has reached the launcher when that returns."""
    relay = side.agent(0)
    channel, _ = side.join(relay, 1)
    channel.send(hello(1))
    channel.send(request(7))
    channel.close()
    side.until(lambda: len(side.coordinator.heard) == 2)


@pytest.fixture
def hasty() -> Iterator[Side]:
    """Ends that take each other for lost soon."""
    made = Side("tcp://127.0.0.1:0", SILENCE_S)
    yield made
    made.close()


def test_peace_is_not_silence() -> None:
    """Where nobody has anything to say for long, both ends know that the other is there."""
    silence_s = 4.0  # several beats, so that one which comes late ends nothing
    tcp = Side("tcp://127.0.0.1:0", silence_s)
    tcp.agent(0)
    tcp.agent(1)
    with tcp.changed:
        tcp.changed.wait_for(lambda: bool(tcp.lost or tcp.ends), 1.5 * silence_s)
        seen = (list(tcp.lost), dict(tcp.ends))
    tcp.close()
    assert seen == ([], {})


def test_a_silent_agent_is_told_of_once(hasty: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that has been dismissed."""
    relays = [hasty.agent(0), hasty.agent(1)]
    hasty.server.dismiss(1)
    for relay in relays:
        monkeypatch.setattr(relay, "_keep_beat", lambda now_s: None)
    begun_s = time.monotonic()
    hasty.until(lambda: hasty.lost == [0])
    assert time.monotonic() - begun_s < SILENCE_S + 20.0


def test_ranks_behind_an_agent_that_was_given_up_are_not_heard(hasty: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as lost, so other processes may have their numbers when the agent can be reached again."""
    relay = hasty.agent(0)
    passed_on = threading.Event()
    take = relay._take

    def take_and_tell(frames: list[bytes]) -> None:
        take(frames)
        if frames[-1] == encode(request(5)):
            passed_on.set()

    # Before anything is sent: the relay's thread looks the method up before it waits for what it passes to it.
    monkeypatch.setattr(relay, "_take", take_and_tell)
    channel, _ = hasty.join(relay, 1)
    greet(channel, 1)
    heard = len(hasty.coordinator.heard)
    monkeypatch.setattr(relay, "_keep_beat", lambda now_s: None)
    hasty.until(lambda: hasty.lost == [0])
    channel.send(request(5))
    assert passed_on.wait(PATIENCE_S)
    relay.say(b"back")
    hasty.until(lambda: (0, b"back") in hasty.told)
    assert len(hasty.coordinator.heard) == heard


def test_a_silent_launcher(hasty: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is told after the same time."""
    hasty.agent(0)
    monkeypatch.setattr(hasty.server, "_keep_beat", lambda now_s: None)
    hasty.until(lambda: bool(hasty.ends))
    assert hasty.ends == {0: f"no message from it for {SILENCE_S:g} s"}


def test_a_launcher_that_ends(tcp: Side) -> None:
    """Told at once, and its ranks find their own launcher gone when the agent ends."""
    relay = tcp.agent(0)
    channel, _ = tcp.join(relay, 0)
    greet(channel, 0)
    tcp.server.close()
    tcp.until(lambda: bool(tcp.ends))
    assert "closed the connection" in tcp.ends[0]
    relay.close()
    with pytest.raises(DdlInternalError, match="the launcher is gone"):
        listen(channel)


def listen(channel: Channel) -> None:
    """Receives until something is wrong, for at most 10 s."""
    for _ in range(100):
        channel.receive(0.1)


def stranger(side: Side, patient: bool) -> tuple[Relay, str, list[str]]:
    """Agent 2, with a key that the launcher does not know yet; the key; and why the agent is no more."""
    keys = KeyPair()
    access = side.server.agent_access(side.server.agents_endpoint)
    own = msgspec.structs.replace(access, client_public=keys.public, client_secret=keys.secret)
    ends: list[str] = []

    def part(reason: str) -> None:
        with side.changed:
            ends.append(reason)
            side.changed.notify_all()

    relay = Relay(own, 2, heard=lambda _: None, gone=part, silence_s=PEACE_S, patient=patient)
    side.relays.append(relay)
    return relay, keys.public, ends


def test_a_key_that_is_admitted_late(tcp: Side) -> None:
    """An agent that made keys of its own gets in when the launcher was told of them, and not before."""
    relay, key, ends = stranger(tcp, patient=True)
    relay.start()
    relay.say(b"here")
    with tcp.changed:
        assert not tcp.changed.wait_for(lambda: bool(tcp.told), 0.4)
    tcp.server.admit(key)
    tcp.until(lambda: bool(tcp.told or ends))
    assert (tcp.told, ends) == ([(2, b"here")], [])


@pytest.mark.parametrize("patient", [True, False])
def test_words_to_a_connection_that_was_refused_meanwhile(
    tcp: Side, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal may come between the look for it and what the agent says: it tries again, or ends for that reason."""
    relay, key, ends = stranger(tcp, patient)
    upward, refused = relay._upward, threading.Event()

    def late() -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not refused.is_set() and relay._upstream.poll(0, zmq.POLLOUT) and time.monotonic() < deadline_s:
            time.sleep(0.001)  # the refusal is the other thread's of libzmq
        if not relay._upstream.poll(0, zmq.POLLOUT):
            refused.set()
        upward()

    monkeypatch.setattr(relay, "_upward", late)
    relay.say(b"here")
    relay.start()
    assert refused.wait(PATIENCE_S)
    tcp.server.admit(key)
    tcp.until(lambda: bool(tcp.told or ends))
    if patient:
        assert (tcp.told, ends) == ([(2, b"here")], [])
    else:
        assert len(ends) == 1 and "does not admit this agent" in ends[0], ends


def test_a_second_agent_under_a_number_is_not_heard(tcp: Side) -> None:
    """Numbers are given by the launcher, each once."""
    tcp.agent(0)
    access = tcp.server.agent_access(tcp.server.agents_endpoint)
    again = Relay(access, 0, heard=lambda _: None, gone=lambda _: None, silence_s=PEACE_S)
    tcp.relays.append(again)
    again.start()
    again.say(b"me too")
    deadline_s = time.monotonic() + PATIENCE_S
    while not tcp.server.dropped and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert tcp.told == [(0, b"here")]


def test_an_agent_that_was_cut_off_before_it_was_answered_is_heard_again(
    tcp: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its new connection, under the same number; the answer goes there, and nothing is dropped."""
    relay, key, ends = stranger(tcp, patient=True)
    tcp.server.admit(key)
    words: list[bytes] = []
    monkeypatch.setattr(relay, "_heard", words.append)
    downward, cut = relay._downward, threading.Event()

    def cut_off() -> None:
        if cut.is_set():
            cut.clear()
            relay._try_again()
        downward()

    monkeypatch.setattr(relay, "_downward", cut_off)
    relay.start()
    relay.say(b"here")
    tcp.until(lambda: tcp.told == [(2, b"here")])
    cut.set()
    relay.say(b"and more")
    again = [(2, b"here"), (2, b"and more")]
    tcp.until(lambda: len(tcp.told) >= 3 and tcp.told[-2:] == again)
    # The second word may have been heard before the cut, too: then it is heard again, as the first one is.
    assert tcp.told in ([(2, b"here"), *again], [*again, *again]), "in order, and what may not have been heard again"
    tcp.server.tell(2, b"welcome")
    deadline_s = time.monotonic() + PATIENCE_S
    while not words and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (words, ends, tcp.server.dropped) == ([b"welcome"], [], 0)


# --- where nobody watches the processes


RANK_1 = """
import os, sys
from ddlcore.control.client import connect
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_coordinator import Hello
channel, store = connect(sys.argv[1], 1)
channel.send(Hello(1, (0, 1), 1, PROTOCOL, "0", 0))
assert channel.receive(10.0)
if "goodbye" in sys.argv:
    channel.close()
os._exit(0)
"""


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_line_that_ends_is_a_rank_that_ends(goodbye: bool) -> None:
    """With ``by_line``: only one that ends without a goodbye, though a new one may have its descriptor."""
    coordinator = EchoCoordinator()
    server = Server(2, coordinator, "tcp://127.0.0.1:0", by_line=True)
    server.start()
    channel, store = connect(server.job_file, 0)
    try:
        assert greet(channel, 0) == [Welcome("for 0")]
        subprocess.run([sys.executable, "-c", RANK_1, server.job_file, *(["goodbye"] if goodbye else [])], check=True)
        heard = channel.receive(1.0 if goodbye else PATIENCE_S)
        assert heard == ([] if goodbye else [Lost((1,), "its connection to the coordinator ended")])
        again, again_store = connect(server.job_file, 1)
        greet(again, 1)
        assert channel.receive(0.3) == []
        again.close()
        again_store.close()
    finally:
        channel.close()
        store.close()
        server.close()


def test_a_successor_takes_over_the_ranks_of_an_agent(tcp: Side) -> None:
    """What ranks say on the connections of the lost launcher is void; what they say on new ones waits for the successor."""
    held = threading.Event()

    def part(reason: str) -> None:
        relay.hold(encode(CoordinatorLost(reason)))
        held.set()

    access = tcp.server.agent_access(tcp.server.agents_endpoint)
    words: list[bytes] = []
    relay = Relay(access, 0, heard=words.append, gone=part, silence_s=PEACE_S)
    tcp.relays.append(relay)
    relay.start()
    relay.say(b"here")
    tcp.until(lambda: (0, b"here") in tcp.told)
    channel, store = tcp.join(relay, 1)
    greet(channel, 1)
    store.set("key", b"of the first launcher")
    tcp.server.close()
    (lost,) = channel.receive(PATIENCE_S)
    assert isinstance(lost, CoordinatorLost) and "closed the connection" in lost.reason and held.is_set()
    channel.send(request(5))
    again, new_store = tcp.join(relay, 1)
    again.send(hello(1))
    relay.say(b"afterwards")
    heir = Side("tcp://127.0.0.1:0")
    try:
        relay.join(heir.server.agent_access(heir.server.agents_endpoint), b"adopt me")
        heir.until(lambda: (0, b"adopt me") in heir.told)
        assert heir.told[0] == (0, b"adopt me"), "before what was said earlier"
        until_s = time.monotonic() + PATIENCE_S
        while relay._patient and time.monotonic() < until_s:
            time.sleep(0.01)
        assert not relay._patient, "a heartbeat has come"
        time.sleep(0.1)
        assert heir.coordinator.heard == [], "a heartbeat is no answer"
        heir.server.tell(0, b"adopted")
        assert again.receive(PATIENCE_S) == [Welcome("for 1")]
        assert heir.coordinator.heard == [(1, hello(1))]
        new_store.set("key", b"of the second")
        assert new_store.get("key", 1.0) == b"of the second"
        heir.until(lambda: len(heir.told) >= 2)
        assert heir.told == [(0, b"adopt me"), (0, b"afterwards")]
        assert words == [b"adopted"]
    finally:
        heir.close()


@pytest.mark.parametrize("adopted", [False, True])
def test_the_end_of_the_first_launcher_is_noticed_once(tcp: Side, adopted: bool) -> None:
    """The command that started the agent may end long after the connection: that is no loss of the successor."""
    losses: list[str] = []
    held = threading.Event()

    def part(reason: str) -> None:
        losses.append(reason)
        relay.hold(encode(CoordinatorLost(reason)))
        held.set()

    relay = tcp.agent(0)
    relay._gone = part
    tcp.server.close()
    assert held.wait(PATIENCE_S)
    heir = Side("tcp://127.0.0.1:0")
    try:
        if not adopted:
            relay.lose("its standard input ended")
        relay.join(heir.server.agent_access(heir.server.agents_endpoint), b"adopt me")
        heir.until(lambda: (0, b"adopt me") in heir.told)
        heir.server.tell(0, b"adopted")
        tcp.until(lambda: b"adopted" in tcp.words[0])
        relay.lose("its standard input ended")
        relay.say(b"still here")
        heir.until(lambda: (0, b"still here") in heir.told)
        assert len(losses) == 1
    finally:
        heir.close()


def holds(relay: Relay) -> threading.Event:
    """Let ``relay`` hold what ranks say when its launcher is lost. Return an event that is set then."""
    held = threading.Event()

    def part(reason: str) -> None:
        relay.hold(encode(CoordinatorLost(reason)))
        held.set()

    relay._gone = part
    return held


def test_what_a_launcher_says_after_its_loss_does_not_count(tcp: Side) -> None:
    """It was silent for a moment too long. What ranks say still waits for its successor."""
    relay = tcp.agent(0)
    held = holds(relay)
    relay.lose("no message from it for 3 s")
    assert held.wait(PATIENCE_S)
    channel, _ = tcp.join(relay, 1)
    channel.send(hello(1))
    tcp.server.tell(0, b"too late")
    time.sleep(0.3)  # it has arrived
    heir = Side("tcp://127.0.0.1:0")
    try:
        relay.join(heir.server.agent_access(heir.server.agents_endpoint), b"adopt me")
        heir.until(lambda: (0, b"adopt me") in heir.told)
        heir.server.tell(0, b"adopted")
        assert channel.receive(PATIENCE_S) == [Welcome("for 1")], "the successor has heard it"
        assert tcp.words[0] == [b"welcome", b"adopted"]
    finally:
        heir.close()


def test_ranks_register_again_with_the_second_successor(tcp: Side) -> None:
    """The first one has answered just before the agent went on, so it has what ranks had sent."""
    relay = tcp.agent(0)
    held = holds(relay)
    tcp.server.close()
    assert held.wait(PATIENCE_S)
    heirs = [Side("tcp://127.0.0.1:0"), Side("tcp://127.0.0.1:0")]
    try:
        for number, heir in enumerate(heirs):
            relay.join(heir.server.agent_access(heir.server.agents_endpoint), b"adopt me")
            heir.until(lambda heir=heir: (0, b"adopt me") in heir.told)  # type: ignore[misc]
            if number == 0:
                heir.server.tell(0, b"adopted")
                channel, _ = tcp.join(relay, 1)
                greet(channel, 1)
        (lost,) = channel.receive(PATIENCE_S)
        assert isinstance(lost, CoordinatorLost)
        again, _ = tcp.join(relay, 1)
        again.send(hello(1))
        heirs[1].server.tell(0, b"adopted")
        assert again.receive(PATIENCE_S) == [Welcome("for 1")]
        assert heirs[1].coordinator.heard == [(1, hello(1))]
    finally:
        for heir in heirs:
            heir.close()


def test_a_successor_that_is_not_there_yet(tcp: Side) -> None:
    """The agent tries again and again, and goes to another one if it is told to."""
    relay = tcp.agent(0)
    lost: list[str] = []

    def part(reason: str) -> None:
        relay.hold(encode(CoordinatorLost(reason)))
        lost.append(reason)

    relay._gone = part
    nowhere = Side("tcp://127.0.0.1:0")
    access = nowhere.server.agent_access(nowhere.server.agents_endpoint)
    nowhere.close()
    relay.lose("standard input ended")
    until_s = time.monotonic() + PATIENCE_S
    while not lost and time.monotonic() < until_s:
        time.sleep(0.01)
    assert lost == ["standard input ended"]
    relay.join(access, b"adopt me")
    time.sleep(0.5)
    heir = Side("tcp://127.0.0.1:0")
    try:
        relay.join(heir.server.agent_access(heir.server.agents_endpoint), b"and me")
        heir.until(lambda: (0, b"and me") in heir.told)
        assert (0, b"adopt me") not in heir.told
    finally:
        heir.close()
