"""The store of a job behaves alike on every wire; its shelf, without any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlcore.control.store import Shelf
from ddlcore.errors import Closed, DeadlineExceeded, PeerLost
from ddlcore.messages.store import StoreAdd, StoreDelete, StoreGet, StoreReply, StoreRequest, StoreSet
from tests.control.echo import PATIENCE_S, Net, hello

SOON_S = 20.0  # by when another rank's call must have raised


def in_thread(call: Callable[[], bytes]) -> Future[bytes]:
    """``call`` under way in a thread, where it has had the time to be parked."""
    future: Future[bytes] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    time.sleep(0.1)
    assert not future.done()
    return future


def test_values_are_shared(net: Net) -> None:
    """What one rank sets all get, whatever the bytes; a second set replaces it."""
    (_, first), (_, second) = net.join(0), net.join(1)
    value = bytes(range(256)) * 1000
    first.set("a", value)
    assert second.get("a", PATIENCE_S) == value
    second.set("a", b"")
    assert first.get("a", 0.0) == b""


def test_a_get_waits_for_its_key(net: Net) -> None:
    """A get that comes first is answered by the set, and only by that of its key."""
    (_, first), (_, second) = net.join(0), net.join(1)
    future = in_thread(lambda: second.get("late", PATIENCE_S))
    first.set("other", b"no")
    first.set("late", b"yes")
    assert future.result(PATIENCE_S) == b"yes"


def test_add_counts(net: Net) -> None:
    """Sums are exact under calls of several ranks and threads; a key that is missing is 0; a sum is a value."""
    stores = [net.join(rank)[1] for rank in (0, 1)]

    def count(index: int) -> int:
        return stores[index % 2].add("n", 1)

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(count, range(40))) == list(range(1, 41))
    assert stores[0].add("n", -50) == -10
    assert stores[1].get("n", 0.0) == b"-10"


def test_add_wakes_a_get(net: Net) -> None:
    """The first add makes the key."""
    (_, first), (_, second) = net.join(0), net.join(1)
    future = in_thread(lambda: second.get("n", PATIENCE_S))
    assert first.add("n", 3) == 3
    assert future.result(PATIENCE_S) == b"3"


def test_add_to_a_text_is_an_error(net: Net) -> None:
    """It names the key and leaves the value."""
    _, store = net.join(0)
    store.set("word", b"five")
    with pytest.raises(ValueError, match=r"store\.add\('word'\): .* no whole number"):
        store.add("word", 1)
    assert store.get("word", 0.0) == b"five"


def test_delete_forgets_a_prefix(net: Net) -> None:
    """Keys that begin with it are gone, others stay."""
    _, store = net.join(0)
    for key in ("a/1", "a/2", "b/1"):
        store.set(key, b"x")
    store.delete("a/")
    assert store.get("b/1", 0.0) == b"x"
    for key in ("a/1", "a/2"):
        with pytest.raises(DeadlineExceeded):
            store.get(key, 0.0)


def test_a_deadline_is_kept_and_the_store_usable_after_it(net: Net) -> None:
    """DeadlineExceeded names the key and the time; the next calls get their own answers."""
    _, store = net.join(0)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"'nobody'.*0\.2 s"):
        store.get("nobody", 0.2)
    assert 0.19 <= time.monotonic() - start < 20.0
    store.set("nobody", b"late")
    store.set("other", b"fine")
    assert store.get("other", 0.0) == b"fine"
    assert store.get("nobody", 0.0) == b"late"


def test_late_answers_go_to_nobody(served: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply to a call that gave up is not taken for that to the next one on the same line."""
    _, store = served.join(0)
    store.set("fine", b"value")
    monkeypatch.setattr("ddlcore.control.store._LATE_S", -0.1)  # the rank is out of patience before the launcher
    with pytest.raises(DeadlineExceeded, match="the launcher has not answered"):
        store.get("nobody", 0.2)
    time.sleep(0.2)
    assert store.add("n", 5) == 5
    monkeypatch.undo()
    assert store.get("fine", 0.0) == b"value"


def test_calls_of_threads_do_not_wait_for_each_other(net: Net) -> None:
    """A get is answered by a set of the same rank's other thread."""
    _, store = net.join(0)
    future = in_thread(lambda: store.get("mine", PATIENCE_S))
    start = time.monotonic()
    store.set("mine", b"!")
    assert future.result(PATIENCE_S) == b"!"
    assert time.monotonic() - start < 20.0


def test_a_lost_rank_ends_gets(net: Net) -> None:
    """Those that wait, and those that come later, raise PeerLost with rank and reason; values still come."""
    (_, first), _ = net.join(0), net.join(1)
    first.set("there", b"1")
    future = in_thread(lambda: first.get("never", 60.0))
    net.network.rank_ended(1, "killed by signal 9 (SIGKILL)")
    with pytest.raises(PeerLost, match=r"rank 1 lost during store\.get\('never'\): killed by signal 9") as caught:
        future.result(SOON_S)
    assert caught.value.ranks == (1,)
    with pytest.raises(PeerLost):
        first.get("never", 60.0)
    assert first.get("there", 0.0) == b"1"


def test_a_clean_end_ends_no_get(net: Net) -> None:
    """A rank that left as it should is no loss: the get goes on."""
    (_, first), (_, second) = net.join(0), net.join(1)
    future = in_thread(lambda: first.get("key", PATIENCE_S))
    net.network.rank_ended(1, "exited with code 0")
    time.sleep(0.1)
    assert not future.done()
    second.set("key", b"v")
    assert future.result(PATIENCE_S) == b"v"


def test_survivors_may_begin_anew(net: Net) -> None:
    """A loss from before a rank's Hello does not end its gets."""
    channel, store = net.join(0)
    net.join(1)
    net.network.rank_ended(1, "killed by signal 9 (SIGKILL)")
    assert channel.receive(PATIENCE_S)
    channel.send(hello(0))
    assert channel.receive(PATIENCE_S)
    future = in_thread(lambda: store.get("new", PATIENCE_S))
    store.set("new", b"world")
    assert future.result(PATIENCE_S) == b"world"


def test_close_ends_calls(net: Net) -> None:
    """A call under way raises Closed soon, later ones at once; the rank's channel goes on."""
    channel, store = net.join(0)
    future = in_thread(lambda: store.get("never", 60.0))
    store.close()
    store.close()
    with pytest.raises(Closed, match=r"store\.get\('never'\)"):
        future.result(SOON_S)
    with pytest.raises(Closed):
        store.set("a", b"")
    channel.send(hello(0))
    assert channel.receive(PATIENCE_S)


KEYS = st.sampled_from(["a", "a/b", "b", ""])
CALLS = st.one_of(
    st.builds(StoreSet, st.just(0), KEYS, st.sampled_from([b"1", b"-7", b"x"])),
    st.builds(StoreAdd, st.just(0), KEYS, st.integers(-3, 3)),
    st.builds(StoreDelete, st.just(0), KEYS),
    st.builds(StoreGet, st.just(0), KEYS, st.sampled_from([0.0, 1.0, 1e9])),
)


@given(st.lists(st.tuples(CALLS, st.floats(0.0, 0.7)), max_size=30))
def test_every_call_is_answered_once_as_a_dictionary_would(calls: list[tuple[StoreRequest, float]]) -> None:
    """Against a dictionary: each call gets one reply, a get by its deadline or with a value that was set."""
    shelf: Shelf[int] = Shelf()
    values: dict[str, bytes] = {}
    replies: dict[int, StoreReply] = {}
    now_s = 0.0
    for client, (call, pause_s) in enumerate(calls):
        now_s += pause_s
        expected = None
        if isinstance(call, StoreDelete):
            values = {key: value for key, value in values.items() if not key.startswith(call.prefix)}
        elif isinstance(call, StoreSet):
            values[call.key] = call.value
        elif isinstance(call, StoreAdd) and values.get(call.key) != b"x":
            expected = values[call.key] = b"%d" % (int(values.get(call.key, b"0")) + call.amount)
        elif isinstance(call, StoreGet):
            expected = values.get(call.key)
        for answered, reply in shelf.expire(now_s) + shelf.handle(client, 0, call, now_s):
            assert answered not in replies
            replies[answered] = reply
        if expected is not None:
            assert replies[client].value == expected
        assert (shelf.deadline_s() or now_s + 1) > now_s
    waiting = shelf.lose({1: "gone"})
    assert {client for client, _ in waiting}.isdisjoint(replies)
    assert len(replies) + len(waiting) == len(calls)
    assert shelf.deadline_s() is None


def test_a_rank_that_is_back_and_another_that_is_lost_between_two_calls() -> None:
    """As many ranks are lost as before, but not the same: the wait for a value fails, and names the new one."""
    shelf: Shelf[int] = Shelf()
    assert shelf.lose({1: "gone"}) == []
    shelf.hello(0)
    assert shelf.handle(7, 0, StoreGet(5, "key", 60.0), 0.0) == []
    ((client, reply),) = shelf.lose({2: "killed"})
    assert (client, reply.serial, reply.error) == (7, 5, "lost: 2: killed")
    shelf.hello(0)
    ((client, reply),) = [*shelf.handle(8, 0, StoreGet(6, "key", 60.0), 0.0), *shelf.lose({1: "gone again"})]
    assert (client, reply.error) == (8, "lost: 1: gone again")
