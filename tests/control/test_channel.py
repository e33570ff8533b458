"""A rank's line to the coordinator behaves alike on every wire."""

from __future__ import annotations

import threading
import time

import pytest

from ddlcore.errors import Closed
from ddlcore.messages.to_coordinator import Bye, Done
from ddlcore.messages.to_rank import Answer, Farewell, FromCoordinator, Lost, Welcome
from tests.control.echo import PATIENCE_S, Net, greet, hello, request


def test_round_trip(net: Net) -> None:
    """What a rank sends reaches the coordinator under its rank, and the answer comes back to it alone."""
    first, _ = net.join(0)
    second, _ = net.join(1)
    first.send(request(7))
    assert first.receive(PATIENCE_S) == [Answer(0, 7, ())]
    assert second.receive(0.0) == []
    assert net.coordinator.heard == [(0, hello(0)), (1, hello(1)), (0, request(7))]


def test_order_is_kept(net: Net) -> None:
    """Messages of one rank arrive, and are answered, in the order of sending."""
    channel, _ = net.join(0)
    for serial in range(20, 120):
        channel.send(request(serial))
    answers: list[FromCoordinator] = []
    while len(answers) < 100:
        arrived = channel.receive(PATIENCE_S)
        assert arrived
        answers += arrived
    assert answers == [Answer(0, serial, ()) for serial in range(20, 120)]


def test_receive_times_out_with_nothing(net: Net) -> None:
    """An idle line gives [] when the timeout has passed, not before."""
    channel, _ = net.join(0)
    start = time.monotonic()
    assert channel.receive(0.15) == []
    assert 0.14 <= time.monotonic() - start < 20.0


def test_wake_ends_a_wait(net: Net) -> None:
    """`wake` from another thread ends a receive that waits for long, in far less than its timeout."""
    channel, _ = net.join(0)
    woken_at = []

    def wake() -> None:
        woken_at.append(time.perf_counter())
        channel.wake()

    delays = []
    for _ in range(20):
        timer = threading.Timer(0.01, wake)
        timer.start()
        assert channel.receive(PATIENCE_S) == []
        delays.append(time.perf_counter() - woken_at[-1])
        timer.join()
    assert sorted(delays)[10] < 2.0, delays  # 0.1 ms where nothing else runs


def test_wakes_count_once(net: Net) -> None:
    """Wakes before a receive make just that one return at once."""
    channel, _ = net.join(0)
    for _ in range(1000):
        channel.wake()
    start = time.monotonic()
    assert channel.receive(PATIENCE_S) == []
    assert time.monotonic() - start < 20.0
    assert channel.receive(0.05) == []
    assert time.monotonic() - start >= 0.05


def test_the_end_of_a_rank_is_told_to_the_others(net: Net) -> None:
    """`rank_ended` reaches the coordinator, whose verdict reaches the ranks that are left."""
    channel, _ = net.join(0)
    net.join(1)
    net.network.rank_ended(1, "killed by signal 9 (SIGKILL)")
    assert channel.receive(PATIENCE_S) == [Lost((1,), "killed by signal 9 (SIGKILL)")]


def test_last_words_arrive_before_a_new_beginning(net: Net, patient_ends: None) -> None:
    """What was sent before `close` is heard before what the same rank sends on its next line."""
    for _ in range(10):
        net.coordinator.heard.clear()
        channel, _ = net.join(0)
        channel.send(Bye("enough"))
        assert channel.receive(PATIENCE_S) == [Farewell()]
        channel.send(Done())
        channel.close()
        again, _ = net.join(0, greeting=False)
        assert greet(again, 0) == [Welcome("for 0")]
        again.close()
        assert [type(message).__name__ for _, message in net.coordinator.heard] == ["Hello", "Bye", "Done", "Hello"]


def test_close_waits_for_what_was_sent(net: Net, patient_ends: None) -> None:
    """A line that is closed before it was even connected still delivers, and everything."""
    channel, _ = net.join(0, greeting=False)
    sent = [request(serial) for serial in range(20, 420)]
    for message in sent:
        channel.send(message)
    channel.close()
    assert net.coordinator.heard == [(0, message) for message in sent]


def test_a_closed_line_says_so(net: Net) -> None:
    """After `close`, which may be repeated, send and receive raise Closed and wake does nothing."""
    channel, _ = net.join(0)
    channel.close()
    channel.close()
    channel.wake()
    with pytest.raises(Closed, match="rank 0"):
        channel.send(request(1))
    with pytest.raises(Closed, match="rank 0"):
        channel.receive(0.0)


def test_overdue_reports_come_out(net: Net) -> None:
    """What the coordinator finds overdue is reported within about a second, once, while ranks wait."""
    channel, _ = net.join(0)
    net.coordinator.late = ["rank 1 is late"]
    start = time.monotonic()
    while not net.reports and time.monotonic() - start < PATIENCE_S:
        channel.receive(0.1)
    assert net.reports == ["rank 1 is late"]
    assert time.monotonic() - start < 20.0
