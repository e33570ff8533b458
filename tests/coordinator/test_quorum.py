"""Which part of an elastic job may form the next world, and that two parts never both may."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlcore.coordinator.membership import Coordinating, ElasticMembership, MemberPatience
from ddlcore.coordinator.quorum import Quorum
from ddlcore.messages.elastic import Ballot, Complete, Dismissed, NextWorld, Opened, Process, Register
from ddlcore.messages.ranks import FIRST_START, LaunchedRank
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_rank import Outgoing, Refused

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
    whole = world([(LaunchedRank(place), FIRST_START) for place in range(len(sides))])
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


def begun(hosts: tuple[int, ...] = (0, 1, 2, 3)) -> ElasticMembership:
    """A membership whose first world has the places of ``hosts``; the launcher runs on host 0."""
    one = ElasticMembership(hosts, 1, len(hosts), PATIENCE, 0, Quorum(), Coordinating(host=0))
    told: Outgoing[LaunchedRank] = []
    for place in range(len(hosts)):
        told = one.register(place, register(0, -1, reason=""))
    assert all(isinstance(message, NextWorld) for _, message in told) and len(told) == len(hosts)
    return one


def test_the_part_with_the_launcher_goes_on_if_it_is_half() -> None:
    one = begun()
    one.ended(2, "its host is gone", certain=False)
    one.ended(3, "its host is gone", certain=False)
    assert one.register(0, register(1, 5, (1, 0))) == []
    told = one.register(1, register(1, 5, (1, 0)))
    assert [place for place, message in told if isinstance(message, NextWorld)] == [0, 1]


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
    assert [type(message) for _, message in one.register(0, register(1, 5, (1, 0)))] == [NextWorld]


def test_a_dismissed_rank_has_no_vote_for_a_world_that_it_is_not_in() -> None:
    """Rank 1 is to leave when its host and that of rank 2 are cut off, and never hears of its dismissal."""
    one = begun((0, 1, 2))
    opened = opened_by(one)
    one.dismiss([1], "its host leaves")
    assert one.register(1, register(1, 5, (1, 0), "")) == [] and one.register(0, register(1, 5, (1, 0), "")) == []
    told = one.ended(2, "no message from its host", certain=False)
    assert [(place, type(message)) for place, message in told] == [(1, Dismissed)]
    assert one.missing() == [1], "it may live, and train with rank 2"
    other = successor()
    assert other.adopt([opened], at_home((1, 0), (2, 0)), []) == []
    told = [*other.register(1, register(1, 5, (1, 0))), *other.register(2, register(1, 5, (1, 0)))]
    assert [(place, type(message)) for place, message in told] == [(1, NextWorld), (2, NextWorld)]
    told = one.ended(1, "no message from its host", certain=False)
    assert [(place, type(message)) for place, message in told] == [(0, Refused)] and one.has_no_quorum


def test_the_others_go_on_when_the_end_of_the_dismissed_is_certain() -> None:
    one = begun()
    one.dismiss([1, 2, 3], "their hosts leave")
    for place in (1, 2, 3):
        assert one.register(place, register(1, 5, (1, 0), "")) == []
    told = one.register(0, register(1, 5, (1, 0), ""))
    assert [(place, type(message)) for place, message in told] == [(place, Dismissed) for place in (1, 2, 3)]
    assert one.ended(1, "exited with code 0") == [], "0 is one of three"
    told = one.ended(2, "exited with code 0")
    assert [message.members for _, message in told if isinstance(message, NextWorld)] == [(0,)], "0 is the first of two"
    assert one.ended(3, "exited with code 0") == [] and one.missing() == []


def test_few_leave_at_once() -> None:
    """The usual case: those that stay are a quorum without those that leave."""
    one = begun()
    one.dismiss([1], "its host leaves")
    told = [one.register(place, register(1, 5, (1, 0), "")) for place in range(4)][-1]
    assert [type(message) for _, message in told] == [Dismissed, NextWorld, NextWorld, NextWorld]


def test_one_that_hangs_after_its_dismissal_is_evicted() -> None:
    one = ElasticMembership((0, 1, 2, 3), 1, 4, MemberPatience(10.0, evict_s=5.0), 0, Quorum(), Coordinating(host=0))
    for place in range(4):
        one.register(place, register(0, -1, reason=""))
    one.dismiss([1, 2, 3], "their hosts leave")
    for place in range(4):
        one.register(place, register(1, 5, (1, 0), ""))
    one.ended(3, "exited with code 0")
    assert [one.overdue(second) for second in (0.0, 4.0)] == [([], [])] * 2 and not one.evicted
    one.overdue(5.0)
    assert set(one.evicted) == {1, 2}


def test_a_part_waits_for_whoever_may_still_give_it_a_quorum() -> None:
    """Rank 3 is still in world 1, which began without its knowledge; in world 2 it is not.

    World 2 is lost before it has begun, and so world 1 counts, too: rank 3 has a vote, or none where it has died.
    """

    def lost(rest: tuple[int, ...] = (0, 1, 2)) -> ElasticMembership:
        one = successor()
        first = FOUR
        second = world([(0, 0), (1, 0), (2, 0)], 2)
        one.adopt([first, second], at_home((2, 0), (1, 0), (3, 0)), [])
        assert one.register(1, register(2, 5)) == []
        return one

    one = lost()
    one.ended(2, "no message from its host", certain=False)
    assert one.over, "neither is rank 2 there, nor rank 0"
    one = lost()
    assert [type(message) for _, message in one.register(2, register(2, 5))] == []
    assert one.missing() == [3] and not one.over
    told = one.register(3, register(1, 5, (1, 0)))
    assert [message.members for _, message in told if isinstance(message, NextWorld)] == [(1, 2, 3)] * 3
    one = lost()
    one.register(2, register(2, 5))
    told = one.ended(3, "killed")
    assert [message.members for _, message in told if isinstance(message, NextWorld)] == [(1, 2)] * 2


@pytest.mark.parametrize("certain", [False, True])
def test_no_world_opens_with_those_of_a_lost_host_that_are_not_given_up_yet(certain: bool) -> None:
    """Of six ranks, three have crashed and wait to join again on the host that is lost, with one that trains."""
    one = begun((0, 0, 1, 1, 1, 1))
    for place in (3, 4, 5):
        one.ended(place, "killed")
    for place in (0, 1, 2):
        one.register(place, register(1, 5, (1, 0)))
    for place in (3, 4, 5):
        one.started(place, 1)
        assert one.register(place, register(0, -1, reason="")) == []
    for place in (0, 1):
        one.register(place, register(2, 6, (2, 0)))
    assert one.unheard((2, 3, 4, 5), certain) == []
    told = [message for place in (2, 3, 4, 5) for message in one.ended(place, "its host is gone", certain)]
    assert [message.members for _, message in told if isinstance(message, NextWorld)] == [(0, 1)] * 2


def test_a_world_counts_alone_when_all_its_members_are_there() -> None:
    """They have received it; whether they have taken over the state does not matter for the quorum."""
    one = begun()
    one.ended(3, "killed")
    for place in (0, 1, 2):
        one.register(place, register(1, 5, (1, 0)))
    assert opened_by(one).effective == (1, 0)
    one.began(2)
    opened = opened_by(one)
    assert opened.effective == (2, 0) and opened.taken == (1, 0)
    one.began(1)  # late news of an older world
    assert opened_by(one).effective == (2, 0)
    heir = successor()
    heir.adopt([opened], at_home((1, 0), (2, 0)), [])
    told = [*heir.register(1, register(2, 4, (1, 0))), *heir.register(2, register(2, 4, (1, 0)))]
    assert [type(message) for _, message in told] == [NextWorld, NextWorld], (
        "nobody had taken over the state with 5 steps"
    )


def test_half_without_ranks_of_the_launcher() -> None:
    """The first one is the lowest on the launcher's host, whatever the order of the hosts."""
    one = ElasticMembership((0, 0, 1, 1), 1, 4, PATIENCE, 0, Quorum(), Coordinating(host=1))
    for place in range(4):
        one.register(place, register(0, -1, reason=""))
    opened = one.opened()
    assert opened is not None and opened.processes == ((2, 0), (3, 0), (0, 0), (1, 0))


def test_what_was_told_of_a_world_is_told_again() -> None:
    """Agents hear of a world more than once. Who has begun to run at a member's place since then is not in it."""
    one = begun()
    before = one.opened()
    one.ended(2, "killed")
    one.started(2)
    assert one.opened() == before and before is not None and (2, 0) in before.processes


# --- a successor


def successor() -> ElasticMembership:
    return ElasticMembership((-1,) * 4, 1, 4, PATIENCE, 0, Quorum(), Coordinating(3, 2))


def at_home(*processes: Process) -> dict[Process, int]:
    """Return the processes with their hosts, if each runs on the host with the number of its place."""
    return {process: process[0] for process in processes}


def opened_by(one: ElasticMembership) -> Opened:
    opened = one.opened()
    assert opened is not None
    return opened


def test_a_successor_opens_no_world_before_it_knows_who_is_there() -> None:
    opened = opened_by(begun())
    one = successor()
    assert [one.register(place, register(1, 5, (1, 0))) for place in (1, 2, 3)] == [[], [], []]
    told = one.adopt([opened], at_home((1, 0), (2, 0), (3, 0)), [])
    worlds = [message for _, message in told if isinstance(message, NextWorld)]
    assert [place for place, _ in told] == [1, 2, 3] and len(worlds) == 3
    assert worlds[0].ballot == (2, 3) and worlds[0].members == (1, 2, 3) and worlds[0].before == 4


def test_a_successor_counts_nobody_before_its_agents_have_come() -> None:
    """Nor whoever has registered and died since."""
    opened = opened_by(begun())
    one = ElasticMembership((-1,) * 4, 2, 4, PATIENCE, 0, Quorum(), Coordinating(3, 2))
    for place in (1, 2):
        one.register(place, register(1, 5, (1, 0)))
    assert [one.overdue(second) for second in (0.0, 601.0)] == [([], []), ([], [])]
    assert one.adopt([opened], at_home((1, 0), (3, 0)), [(2, 0)]) == []
    told = one.register(3, register(1, 5, (1, 0)))
    assert [message.members for _, message in told if isinstance(message, NextWorld)] == [(1, 3), (1, 3)]


def test_a_successor_knows_the_hosts_of_processes_that_were_started_after_the_newest_world() -> None:
    """Rank 3 was moved, and is in no world yet: its transport must not take it for one on its old host."""
    opened = opened_by(begun())
    one = successor()
    assert one.adopt([opened], {(1, 0): 1, (2, 0): 2, (3, 1): 1}, [(3, 0)]) == []
    for place in (1, 2):
        one.register(place, register(1, 5, (1, 0)))
    assert one.joiners() == []
    one.register(3, register(0, -1))
    assert one.joiners() == [3]
    one.register(1, register(2, 6, (2, 3)))
    ((_, world), *_) = one.register(2, register(2, 6, (2, 3)))
    assert isinstance(world, NextWorld) and (world.members, world.hosts) == ((1, 2, 3), (0, 1, 2, 1))


def test_a_successor_knows_that_the_training_is_complete() -> None:
    """Some still save what they have learned; nobody is to wait for them, or to train without them."""
    opened = msgspec.structs.replace(opened_by(begun()), complete=True)
    one = successor()
    assert one.adopt([opened], at_home((1, 0)), [(2, 0), (3, 0)]) == []
    assert one.complete
    assert one.register(1, register(1, 5, (1, 0))) == [(1, Complete())]


def test_a_successor_waits_for_all_that_run() -> None:
    opened = opened_by(begun())
    one = successor()
    assert one.adopt([opened], at_home((1, 0), (2, 0), (3, 0)), []) == []
    assert one.register(1, register(1, 5, (1, 0))) == [] and one.register(3, register(1, 6, (1, 0))) == []
    assert one.missing() == [2]
    told = one.register(2, register(1, 5, (1, 0)))
    assert [message.root for _, message in told if isinstance(message, NextWorld)] == [3, 3, 3]


def test_a_successor_of_the_smaller_part_ends_it() -> None:
    opened = opened_by(begun())
    one = successor()
    one.adopt([opened], at_home((2, 0)), [])
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
    told: Outgoing[LaunchedRank] = []
    for place in came_first:
        told += one.register(place, register(3, 5, (3, 0)))
    told += one.adopt([newer, older], at_home((1, 1), (2, 0), (3, 0)), [])
    for place in {1, 2, 3}.difference(came_first):
        told += one.register(place, register(3, 5, (3, 0)))
    assert [(place, type(message)) for place, message in told] == [(place, NextWorld) for place in (1, 2, 3)]


def test_a_successor_knows_who_has_died() -> None:
    """1 and 3 have died before the launcher was lost; their agents know that. 0 was on the launcher's host."""
    opened = opened_by(begun())
    one = successor()
    one.adopt([opened], at_home((2, 0)), [(1, 0), (3, 0)])
    ((_, refused),) = one.register(2, register(1, 5, (1, 0)))
    assert isinstance(refused, Refused) and "only 1 of 2" in refused.text, "0 may live, and is the first"


def test_a_successor_loses_no_step() -> None:
    """The newest state is on the lost host: no world opens without it."""
    opened = opened_by(begun())
    one = successor()
    newer = Opened(opened.ballot, opened.processes, opened.places, opened.hosts, 9, opened.effective)
    one.adopt([newer], at_home((1, 0), (2, 0), (3, 0)), [])
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


def with_one_that_has_not_heard() -> ElasticMembership:
    """World 2 has begun: 0 has the state, and 2, which is new, has not taken it over yet; 1 was dismissed and has not heard that.

    The launcher is lost, and then 0 dies.
    """
    one = ElasticMembership((-1,) * 4, 1, 4, MemberPatience(10.0, evict_s=60.0), 0, Quorum(), Coordinating(3, 2))
    newest = msgspec.structs.replace(world([(0, 0), (2, 1)], 2, (2, 0)), taken=(1, 0))
    assert one.adopt([newest], at_home((0, 0), (1, 0), (2, 1)), []) == []
    assert one.ended(0, "killed") == []
    return one


def test_a_successor_waits_for_a_state_that_somebody_may_have() -> None:
    one = with_one_that_has_not_heard()
    assert one.register(2, register(2, -1, (1, 0))) == [] and one.missing() == [1]
    told = [message for _, message in one.register(1, register(1, 5, (1, 0)))]
    assert [(message.members, message.root) for message in told if isinstance(message, NextWorld)] == [((1, 2), 1)] * 2


@pytest.mark.parametrize("lose", [lambda one: one.ended(1, "killed"), lambda one: one.unheard([1], False)])
def test_a_successor_waits_for_no_state_that_nobody_has(lose: Callable[[ElasticMembership], object]) -> None:
    one = with_one_that_has_not_heard()
    lose(one)
    ((_, refused),) = one.register(2, register(2, -1, (1, 0)))
    assert isinstance(refused, Refused) and "the ranks with the newest state" in one.over


def test_a_successor_does_not_wait_for_ever_for_a_state() -> None:
    """A process that hangs while it loads neither registers nor ends, and nobody may be told to kill it."""
    one = with_one_that_has_not_heard()
    one._patience = MemberPatience(10.0)
    one.register(2, register(2, -1, (1, 0)))
    assert one.overdue(0.0) == ([], []) and one.overdue(9.0) == ([], []) and not one.over
    _, told = one.overdue(10.0)
    assert [place for place, _ in told] == [2] and "the ranks with the newest state" in one.over


def test_a_successor_does_not_wait_for_ever_for_a_vote() -> None:
    opened = opened_by(begun())
    one = successor()
    newer = Opened((2, 0), ((1, 0), (2, 0)), (1, 2), opened.hosts, 5, (1, 0), (1, 0))
    assert one.adopt([opened, newer], at_home((1, 0), (2, 0), (3, 0)), []) == []
    for place in (1, 2):
        assert one.register(place, register(1, 5, (1, 0))) == []
    assert one.missing() == [3], "with it, this part has three of four"
    assert one.overdue(0.0) == ([], []) and not one.over
    one.overdue(10.0)
    assert "only 2 of 4" in one.over


def test_a_process_is_hoped_for_as_long_as_others_are_waited_for() -> None:
    """Its time does not begin when others began to be waited for."""
    one = successor()
    one._patience = MemberPatience(1000.0, evict_s=60.0)
    newest = msgspec.structs.replace(world([(0, 0), (2, 1)], 2, (2, 0)), taken=(1, 0))
    one.adopt([newest], at_home((0, 0), (1, 0), (2, 1)), [])
    one.register(2, register(2, -1, (1, 0)))
    one.overdue(0.0)
    one.overdue(60.0)
    assert list(one.evicted) == [0]
    one.ended(0, "killed")
    one.overdue(61.0)
    one.overdue(120.0)
    assert list(one.evicted) == [0]
    one.overdue(121.0)
    assert list(one.evicted) == [0, 1]


def test_a_process_before_the_last_one_at_its_place_has_no_vote() -> None:
    """A world of which some agent knows names the later one, which runs in another part of the job."""
    one = successor()
    newest = world([(0, 1), (1, 0), (2, 0)], 2, (2, 0))
    one.adopt([newest], at_home((0, 0), (2, 0)), [])
    assert one.register(0, register(1, 5, (1, 0))) == []
    ((_, refused),) = one.register(2, register(2, 5, (2, 0)))
    assert isinstance(refused, Refused) and "only 1 of 3" in refused.text


def test_a_successor_kills_a_process_that_does_not_come_with_the_state() -> None:
    """Nobody else is there that would wait for it."""
    one = with_one_that_has_not_heard()
    assert one.ended(2, "killed") == [] and not one.over
    assert one.overdue(0.0) == ([], []) and not one.evicted
    one.overdue(61.0)
    assert list(one.evicted) == [1]
    one.ended(1, "killed")
    assert "all ranks that had the state" in one.over
