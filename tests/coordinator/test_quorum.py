"""Which part of an elastic job may form the next world, and that two parts never both may."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlcore.coordinator.membership import Coordinating, MemberPatience, Membership
from ddlcore.coordinator.quorum import Quorum
from ddlcore.messages import PROTOCOL, Ballot, FromCoordinator, Opened, Process, Refused, Register, World

PATIENCE = MemberPatience(10.0)


def world(
    processes: Sequence[Process], generation: int = 1, effective: Ballot = (0, 0), coordinator: int = 0
) -> Opened:
    places = tuple(sorted(place for place, _ in processes))
    return Opened((generation, coordinator), tuple(processes), places, (0,) * 8, 5, effective)


FOUR = world([(0, 0), (1, 0), (2, 0), (3, 0)])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_two_parts_never_both_decide(sides: list[int]) -> None:
    """Each process is in the one part, in the other, or has died; each part may know of the deaths or not."""
    whole = world([(place, 0) for place in range(len(sides))])
    dead = [(place, 0) for place, side in enumerate(sides) if side == 2]
    parts = [{(place, 0) for place, side in enumerate(sides) if side == which} for which in (0, 1)]
    for knows in ((True, True), (True, False), (False, True), (False, False)):
        free = []
        for part, told in zip(parts, knows, strict=True):
            quorum = Quorum([whole])
            for process in dead if told else ():
                quorum.died(process)
            free.append(not quorum.objection(part))
        assert not (free[0] and free[1] and parts[0] and parts[1])


def test_more_than_half_goes_on() -> None:
    assert Quorum([FOUR]).objection({(1, 0), (2, 0), (3, 0)}) == ""
    text = Quorum([FOUR]).objection({(0, 0)})
    assert "only 1 of 4 ranks of world 1" in text and "exactly half" in text


def test_of_two_halves_the_one_with_the_first_goes_on() -> None:
    assert Quorum([FOUR]).objection({(0, 0), (3, 0)}) == ""
    assert Quorum([FOUR]).objection({(1, 0), (2, 0)})


def test_the_dead_have_no_say() -> None:
    quorum = Quorum([FOUR])
    assert quorum.objection({(3, 0)})
    for place in (0, 1, 2):
        quorum.died((place, 0))
    assert quorum.objection({(3, 0)}) == ""


def test_another_process_at_the_place_of_a_member_has_no_say() -> None:
    """It was started after the member had been lost, and may know nothing of what the member has received."""
    assert Quorum([FOUR]).objection({(0, 1), (1, 1), (2, 1), (3, 0)})


def test_each_world_that_may_live_needs_a_quorum() -> None:
    """A later world of which no collective is known may have begun, too."""
    quorum = Quorum([FOUR, world([(0, 0), (1, 0)], 2, (1, 0))])
    quorum.began((1, 0))
    assert quorum.objection({(1, 0), (2, 0), (3, 0)}), "0 and 1 may be in world 2"
    assert quorum.objection({(0, 0), (2, 0), (3, 0)}) == ""
    quorum.died((0, 0))
    assert quorum.objection({(1, 0), (2, 0), (3, 0)}) == ""


def test_older_worlds_do_not_count() -> None:
    quorum = Quorum([FOUR, world([(2, 0), (3, 0)], 2)])
    quorum.began((2, 0))
    assert quorum.objection({(2, 0)}) == ""


def test_an_unknown_world_is_no_world_to_go_on_from() -> None:
    quorum = Quorum([FOUR])
    quorum.began((7, 3))
    assert "nothing is known of world 7" in quorum.objection({(0, 0), (1, 0), (2, 0), (3, 0)})


# --- in the membership


def register(generation: int, steps: int, effective: Ballot = (0, 0), reason: str = "it failed") -> Register:
    return Register(PROTOCOL, "0.1.0", generation, steps, reason, effective=effective)


def begun(hosts: tuple[int, ...] = (0, 1, 2, 3)) -> Membership:
    """A membership whose first world has the places of ``hosts``; the launcher runs on host 0."""
    one = Membership(hosts, 1, len(hosts), PATIENCE, 0, Quorum(), Coordinating(host=0))
    told: list[tuple[int, FromCoordinator]] = []
    for place in range(len(hosts)):
        told = one.register(place, register(0, -1, reason=""))
    assert all(isinstance(message, World) for _, message in told) and len(told) == len(hosts)
    return one


def test_the_part_with_the_launcher_goes_on_if_it_is_half() -> None:
    one = begun()
    one.ended(2, "its host is gone", certain=False)
    one.ended(3, "its host is gone", certain=False)
    assert one.register(0, register(1, 5, (1, 0))) == []
    told = one.register(1, register(1, 5, (1, 0)))
    assert [place for place, message in told if isinstance(message, World)] == [0, 1]


def test_the_smaller_part_ends_with_an_error() -> None:
    one = begun()
    for place in (1, 2, 3):
        one.ended(place, "its host is gone", certain=False)
    told = one.register(0, register(1, 5, (1, 0)))
    assert len(told) == 1 and isinstance(told[0][1], Refused) and "only 1 of 4 ranks" in told[0][1].text
    assert one.over


def test_processes_that_have_died_leave_the_rest_free() -> None:
    one = begun()
    for place in (1, 2, 3):
        one.ended(place, "killed")
    assert [type(message) for _, message in one.register(0, register(1, 5, (1, 0)))] == [World]


def test_half_without_ranks_of_the_launcher() -> None:
    """The first one is the lowest on the launcher's host, whatever the order of the hosts."""
    one = Membership((0, 0, 1, 1), 1, 4, PATIENCE, 0, Quorum(), Coordinating(host=1))
    for place in range(4):
        one.register(place, register(0, -1, reason=""))
    opened = one.opened()
    assert opened is not None and opened.processes == ((2, 0), (3, 0), (0, 0), (1, 0))


# --- a successor


def successor() -> Membership:
    return Membership((-1,) * 4, 1, 4, PATIENCE, 0, Quorum(), Coordinating(3, 2))


def opened_by(one: Membership) -> Opened:
    opened = one.opened()
    assert opened is not None
    return opened


def test_a_successor_opens_no_world_before_it_knows_who_is_there() -> None:
    opened = opened_by(begun())
    one = successor()
    assert [one.register(place, register(1, 5, (1, 0))) for place in (1, 2, 3)] == [[], [], []]
    told = one.adopt([opened], [(1, 0), (2, 0), (3, 0)], [])
    worlds = [message for _, message in told if isinstance(message, World)]
    assert [place for place, _ in told] == [1, 2, 3] and len(worlds) == 3
    assert worlds[0].ballot == (2, 3) and worlds[0].members == (1, 2, 3) and worlds[0].before == 4


def test_a_successor_counts_nobody_before_its_agents_have_come() -> None:
    """Nor whoever has registered and died since."""
    opened = opened_by(begun())
    one = Membership((-1,) * 4, 2, 4, PATIENCE, 0, Quorum(), Coordinating(3, 2))
    for place in (1, 2):
        one.register(place, register(1, 5, (1, 0)))
    assert [one.overdue(second) for second in (0.0, 601.0)] == [([], []), ([], [])]
    assert one.adopt([opened], [(1, 0), (3, 0)], [(2, 0)]) == []
    told = one.register(3, register(1, 5, (1, 0)))
    assert [message.members for _, message in told if isinstance(message, World)] == [(1, 3), (1, 3)]


def test_a_successor_waits_for_all_that_run() -> None:
    opened = opened_by(begun())
    one = successor()
    assert one.adopt([opened], [(1, 0), (2, 0), (3, 0)], []) == []
    assert one.register(1, register(1, 5, (1, 0))) == [] and one.register(3, register(1, 6, (1, 0))) == []
    assert one.missing() == [2]
    told = one.register(2, register(1, 5, (1, 0)))
    assert [message.root for _, message in told if isinstance(message, World)] == [3, 3, 3]


def test_a_successor_of_the_smaller_part_ends_it() -> None:
    opened = opened_by(begun())
    one = successor()
    one.adopt([opened], [(2, 0)], [])
    ((_, refused),) = one.register(2, register(1, 5, (1, 0)))
    assert isinstance(refused, Refused) and "only 1 of 4" in refused.text


@pytest.mark.parametrize("came_first", [(), (1,), (1, 2, 3)])
def test_older_worlds_of_which_a_successor_learns_late_do_not_count(came_first: tuple[int, ...]) -> None:
    """Ranks 0 and 3 were alone for a while, then trained with the others, and the host of rank 0 and the launcher is lost.

    Agents still keep the world of the two, because the launcher never learned that a later one had begun. A rank that
    registers tells it, before or after the other agents have come.
    """
    older = world([(0, 0), (3, 0)], 2, (1, 0))
    newer = world([(0, 0), (1, 1), (2, 0), (3, 0)], 3, (2, 0))
    one = successor()
    told: list[tuple[int, FromCoordinator]] = []
    for place in came_first:
        told += one.register(place, register(3, 5, (3, 0)))
    told += one.adopt([newer, older], [(1, 1), (2, 0), (3, 0)], [])
    for place in {1, 2, 3}.difference(came_first):
        told += one.register(place, register(3, 5, (3, 0)))
    assert [(place, type(message)) for place, message in told] == [(place, World) for place in (1, 2, 3)]


def test_a_successor_knows_who_has_died() -> None:
    """1 and 3 have died before the launcher was lost; their agents know that. 0 was on the launcher's host."""
    opened = opened_by(begun())
    one = successor()
    one.adopt([opened], [(2, 0)], [(1, 0), (3, 0)])
    ((_, refused),) = one.register(2, register(1, 5, (1, 0)))
    assert isinstance(refused, Refused) and "only 1 of 2" in refused.text, "0 may live, and is the first"


def test_a_successor_loses_no_step() -> None:
    """The newest state is on the lost host: no world opens without it."""
    opened = opened_by(begun())
    one = successor()
    newer = Opened(opened.ballot, opened.processes, opened.places, opened.hosts, 9, opened.effective)
    one.adopt([newer], [(1, 0), (2, 0), (3, 0)], [])
    told = [message for place in (1, 2, 3) for message in one.register(place, register(1, 8, (1, 0)))]
    assert all(isinstance(message, Refused) and "newest state" in message.text for _, message in told) and told


def test_a_process_that_was_started_again_counts_as_another_one() -> None:
    one = begun()
    one.ended(3, "killed")
    for place in (0, 1, 2):
        one.register(place, register(1, 5, (1, 0)))
    one.started(3, 3)
    told = one.register(3, register(0, -1, reason=""))
    assert told == [] and one.joiners() == [3]
    for place in (0, 1, 2):
        told = one.register(place, register(2, 6, (2, 0), reason=""))
    opened = opened_by(one)
    assert opened.ballot == (3, 0) and (3, 1) in opened.processes and opened.effective == (2, 0)
