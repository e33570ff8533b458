"""Ranks that another launcher has started come, wait for each other, and are told who else is there."""

from __future__ import annotations

import msgspec

from ddlcore.control.registration import Registration
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import Arrive, Bye, Done, Hello
from ddlcore.messages.to_rank import Arrivals, Lost, Refused, Welcome
from tests.control.echo import EchoCoordinator, hello


def arrive(rank: int, ranks: tuple[int, ...] = (0, 1), token: str = "", patient: bool = True) -> Arrive:
    return Arrive(token or f"process {rank}", ranks, "here", "kin", 100 + rank, patient=patient)


def registration(size: int = 2) -> tuple[Registration, list[int]]:
    seen: list[int] = []
    return Registration(size, EchoCoordinator(), lambda rank, _: seen.append(rank)), seen


def test_they_are_told_when_all_have_come() -> None:
    """Nobody hears anything before; then all hear the same, each rank being noticed once."""
    front, seen = registration()
    assert front.handle(1, arrive(1)) == []
    assert front.handle(1, arrive(1)) == []  # a reminder
    answers = front.handle(0, arrive(0))
    assert [rank for rank, _ in answers] == [0, 1]
    assert answers[0][1] is answers[1][1]
    assert isinstance(answers[0][1], Arrivals)
    assert [(rank, one.pid) for rank, one in answers[0][1].arrived] == [(0, 100), (1, 101)]
    assert seen == [1, 0]


def test_parts_of_the_world_meet_by_themselves() -> None:
    """Two worlds of some of the ranks do not wait for each other."""
    front, _ = registration(4)
    assert front.handle(0, arrive(0, (0, 2))) == []
    assert front.handle(1, arrive(1, (1, 3))) == []
    assert [rank for rank, _ in front.handle(3, arrive(3, (1, 3)))] == [1, 3]
    assert [rank for rank, _ in front.handle(2, arrive(2, (0, 2)))] == [0, 2]


def test_who_comes_again_is_told_at_once() -> None:
    """A second init needs nobody to come anew."""
    front, seen = registration()
    front.handle(0, arrive(0))
    front.handle(1, arrive(1))
    assert [rank for rank, _ in front.handle(1, arrive(1))] == [1]
    assert seen == [0, 1]


def test_who_gives_up_hears_who_has_come() -> None:
    """At once, and about its own world only."""
    front, _ = registration(3)
    front.handle(0, arrive(0, (0, 1, 2)))
    front.handle(2, arrive(2, (0, 2)))
    ((rank, arrivals),) = front.handle(0, arrive(0, (0, 1, 2), patient=False))
    assert rank == 0 and isinstance(arrivals, Arrivals)
    assert [one for one, _ in arrivals.arrived] == [0, 2]


def test_all_give_up_with_the_first() -> None:
    """Otherwise they would soon hear that the first has ended, and take that for the cause."""
    front, _ = registration(4)
    front.handle(0, arrive(0, (0, 1, 2)))
    front.handle(2, arrive(2, (0, 1, 2)))
    front.handle(3, arrive(3, (1, 3)))  # waits for another world
    gives_up = msgspec.structs.replace(arrive(2, (0, 1, 2), patient=False), timeout_s=7.0)
    answers = front.handle(2, gives_up)
    assert [rank for rank, _ in answers] == [0, 2]
    for _, arrivals in answers:
        assert isinstance(arrivals, Arrivals) and arrivals.gave_up_s == 7.0
        assert [one for one, _ in arrivals.arrived] == [0, 2]
    assert [rank for rank, _ in front.rank_ended(2, "its process ended")] == []
    assert [rank for rank, _ in front.handle(1, arrive(1, (1, 3)))] == [1, 3]


def test_a_second_process_of_one_rank_is_refused() -> None:
    """It belongs to another launch; the first goes on."""
    front, seen = registration()
    front.handle(1, arrive(1))
    ((rank, refused),) = front.handle(1, arrive(1, token="another"))
    assert rank == 1 and isinstance(refused, Refused)
    assert refused.text == "rank 1 is taken by process 101 on here"
    assert len(front.handle(0, arrive(0))) == 2
    assert seen == [1, 0]


def test_a_rank_that_ends_meanwhile_is_lost_for_those_who_wait() -> None:
    """Also for those who come later; the world's own rank is named."""
    front, _ = registration(3)
    front.handle(2, arrive(2, (1, 2)))
    front.handle(1, arrive(1, (0, 1, 2)))
    told = front.rank_ended(2, "its process ended")
    assert (LaunchedRank(1), Lost((2,), "its process ended, before init was complete")) in told
    assert front.handle(0, arrive(0, (0, 1, 2))) == [(0, Lost((2,), "its process ended, before init was complete"))]


def test_active_are_those_who_have_come_and_not_left() -> None:
    """Rank 0 stays as long as there are others among them."""
    changes: list[frozenset[int]] = []
    front = Registration(3, EchoCoordinator(), lambda rank, one: None, lambda: changes.append(front.active))
    front.handle(0, arrive(0))
    front.handle(1, arrive(1))
    assert front.missing() == {2}
    front.handle(2, arrive(2, (2,)))
    assert front.active == {0, 1, 2}
    assert front.missing() == set()
    assert front.handle(1, hello(1)) == [(1, Welcome("for 1"))]
    front.handle(1, Bye("done"))
    assert front.active == {0, 1, 2}  # it may still take part in what was promised
    front.handle(1, Done())
    front.rank_ended(2, "its process ended")
    assert front.active == {0}
    assert changes == [{0}, {0, 1}, {0, 1, 2}, {0, 2}, {0}]


def test_the_end_of_rank_0_is_told_to_every_world_with_it() -> None:
    """By its place there; a world without it keeps what it has."""
    front, _ = registration(4)
    for rank, ranks in ((1, (1, 0)), (0, (1, 0)), (2, (2, 3)), (3, (2, 3))):
        front.handle(rank, arrive(rank, ranks))
        front.handle(rank, Hello(rank, ranks, 1, 1, "0", 0))
    told = front.rank_ended(0, "raised RuntimeError: boo")
    assert (LaunchedRank(1), Lost((1,), "raised RuntimeError: boo")) in told
    assert not {2, 3} & {rank for rank, message in told if message == Lost((1,), "raised RuntimeError: boo")}
