"""Where a world stops: one call for all ranks, which none of them has made, whatever the order of the messages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlcore.coordinator.agreed_point import AgreedPoint
from ddlcore.messages.observing import Notice
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.to_coordinator import STOP, CallCount
from ddlcore.messages.to_rank import AgreedCall, CountCalls, FromCoordinator, Outgoing

NONE: tuple[int, ...] = ()


def points(outgoing: Outgoing[WorldRank]) -> dict[int, tuple[int, int]]:
    return {rank: (one.joins, one.call) for rank, one in outgoing if isinstance(one, AgreedCall)}


def test_the_call_after_the_last_one_that_any_rank_has_made() -> None:
    point = AgreedPoint(STOP, range(3))
    assert point.asked("SIGTERM on rank 1") == [(rank, CountCalls(STOP)) for rank in range(3)]
    assert point.asked("SIGUSR1 on rank 2") == []
    assert point.counted(0, CallCount(STOP, 0, 4), NONE) == []
    assert point.counted(2, CallCount(STOP, 0, 5), NONE) == []
    assert point.awaited()[0].details().ranks == (1,)
    told = point.counted(1, CallCount(STOP, 0, 4), NONE)
    assert told == [(rank, AgreedCall(STOP, 0, 6, "SIGTERM on rank 1")) for rank in range(3)]
    assert point.awaited() == [] and point.counted(1, CallCount(STOP, 0, 9), NONE) == []


def test_nobody_answers_before_it_is_asked() -> None:
    point = AgreedPoint(STOP, range(2))
    assert point.counted(0, CallCount(STOP, 0, 4), NONE) == [] and point.counted(1, CallCount(STOP, 0, 4), NONE) == []
    assert point.awaited() == []


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    point = AgreedPoint(STOP, range(3))
    point.asked("x")
    point.counted(0, CallCount(STOP, 0, 4), NONE)
    point.counted(1, CallCount(STOP, 0, 7), NONE)
    assert points(point.gone(2, NONE)) == {0: (0, 8), 1: (0, 8)}
    assert point.gone(1, NONE) == [] and point.gone(0, NONE) == []


def test_all_leave() -> None:
    point = AgreedPoint(STOP, range(2))
    point.asked("x")
    assert point.gone(0, NONE) == [] and point.gone(1, NONE) == []


def test_after_the_join_in_which_a_rank_stands() -> None:
    point = AgreedPoint(STOP, range(2))
    point.asked("x")
    point.counted(0, CallCount(STOP, 1, 8), (0,))
    assert points(point.counted(1, CallCount(STOP, 1, 12), (0,))) == {0: (2, 1), 1: (2, 1)}


def test_a_rank_that_has_left_join_before_another() -> None:
    point = AgreedPoint(STOP, range(2))
    point.asked("x")
    point.counted(0, CallCount(STOP, 2, 0), NONE)
    assert points(point.counted(1, CallCount(STOP, 1, 12), NONE)) == {0: (2, 1), 1: (2, 1)}


@pytest.mark.parametrize(("others", "warned"), [(1, False), (2, True)])
def test_a_rank_that_never_calls_is_told_so(others: int, warned: bool) -> None:
    point = AgreedPoint(STOP, range(2))
    point.asked("SIGTERM on rank 0")
    point.counted(0, CallCount(STOP, 0, others), NONE)
    told = point.counted(1, CallCount(STOP, 0, 0), NONE)
    notices = [(rank, one.text) for rank, one in told if isinstance(one, Notice)]
    assert [rank for rank, _ in notices] == ([1] if warned else [])
    assert all("never called should_stop()" in text for _, text in notices)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_in_every_order_all_ranks_stop_at_the_same_call(data: st.DataObject) -> None:
    """Ranks call as they like, at most two calls apart; questions and answers take as long as they like."""
    size = data.draw(st.integers(1, 4))
    point = AgreedPoint(STOP, range(size))
    calls, held, at = [0] * size, [False] * size, [0] * size  # at: the call that returned True
    to_rank: list[list[FromCoordinator]] = [[] for _ in range(size)]
    to_point: list[list[CallCount]] = [[] for _ in range(size)]
    told: list[AgreedCall | None] = [None] * size
    asked = False
    for _ in range(400):
        moves: list[tuple[str, int]] = [] if asked else [("ask", 0)]
        for rank in range(size):
            if not at[rank] and not held[rank] and calls[rank] < min(calls) + 2:
                moves.append(("call", rank))
            moves += [("hear", rank)] * bool(to_rank[rank]) + [("answer", rank)] * bool(to_point[rank])
        if not moves:
            break
        move, rank = data.draw(st.sampled_from(moves))
        outgoing: Outgoing[WorldRank] = []
        if move == "ask":
            asked, outgoing = True, point.asked("x")
        elif move == "call":
            calls[rank] += 1
            stop = told[rank]
            if stop is not None and calls[rank] >= stop.call:
                at[rank] = calls[rank]
        elif move == "hear":
            message = to_rank[rank].pop(0)
            if isinstance(message, CountCalls):
                held[rank] = True
                to_point[rank].append(CallCount(STOP, 0, calls[rank]))
            elif isinstance(message, AgreedCall):
                held[rank], told[rank] = False, message
                assert calls[rank] < message.call
        else:
            outgoing = point.counted(rank, to_point[rank].pop(0), NONE)
        for other, message in outgoing:
            to_rank[other].append(message)
    if all(at):
        assert len(set(at)) == 1
    assert len(set(filter(None, at))) <= 1
