"""Which processes form the next world of an elastic job, whose state counts, and what ends the job."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.coordinator.membership import ElasticMembership, MemberPatience
from ddlcore.coordinator.sessions import Sessions
from ddlcore.messages.coding import encode
from ddlcore.messages.elastic import Complete, Dismissed, Finished, NextWorld, Register, WorldReport
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import PROTOCOL, Ask, Spec
from ddlcore.messages.to_coordinator import COMMIT, Hello, Request
from ddlcore.messages.to_rank import CountCalls, Lost, Outgoing, Refused, Welcome
from ddlcore.runtime.patience import Patience
from ddlcore.types import DType, Kind

PATIENCE = MemberPatience(5.0, 20.0, 3.0, 8.0)


def register(generation: int = 0, steps: int = -1, reason: str = "", effective: int = 0) -> Register:
    return Register(PROTOCOL, "0.1.0", generation, steps, reason, effective=(effective, 0))


def begun(size: int = 3, least: int = 1, most: int = 0, resets: int = 0) -> ElasticMembership:
    """A job whose first world has opened."""
    one = ElasticMembership((0,) * size, least, most or size, PATIENCE, resets)
    told: Outgoing[LaunchedRank] = []
    for place in range(size):
        assert told == []
        told = one.register(place, register())
    assert told == [(place, NextWorld(1, tuple(range(size)), (0,) * size, 0, 0)) for place in range(size)]
    one.began(1)
    return one


def world_of(told: Outgoing[LaunchedRank]) -> NextWorld:
    (world,) = {message for _, message in told}
    assert isinstance(world, NextWorld)
    assert [place for place, _ in told] == list(world.members)
    return world


def world_of_three() -> Sessions:
    """A world whose ranks have called ``init``; a rank that does not answer for 6 s is evicted."""
    membership = ElasticMembership((0, 0, 0), 1, 3, MemberPatience(600.0, 60.0, 1.0, 6.0))
    one = Sessions(3, ThresholdFusion(), Patience(1.0, 6.0, evicts=True), membership=membership)
    for rank in range(3):
        one.handle(rank, register())
    for rank in range(3):
        one.handle(rank, Hello(rank, (), 1, PROTOCOL, "0.1.0", 1 << 20))
    one.overdue(0.0)
    return one


def asks(number: int) -> Request:
    return Request(0, number, (Ask(0, "gradient", encode(Spec(Kind.ALLREDUCE, DType.F64, (40,)))),))


@pytest.mark.parametrize("asked", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("deaf", [False, True])
def test_only_who_stands_still_is_evicted(asked: tuple[int, ...], deaf: bool) -> None:
    """Rank 0 stops and rank 1 is killed, wherever they are in a step, and also while rank 2 hears no Probe."""
    one = world_of_three()
    for rank in asked:
        one.handle(rank, asks(1))
    one.rank_ended(1, "killed by signal 9 (SIGKILL)")
    one.rank_started(1)
    if deaf:  # rank 2 has left the world, and has not registered yet
        one.overdue(0.5)
    one.handle(2, register(1, 1, "rank 1 lost"))
    for tick in range(2, 40):
        one.overdue(tick / 2)
        assert one.dead().keys() <= {0}
    assert one.dead().keys() == {0}


def test_the_next_process_of_an_evicted_rank_is_not_killed() -> None:
    """Rank 2 has not left the old world yet when a new process takes the place of rank 0. The new process stays alive."""
    one = world_of_three()
    for rank in (1, 2):
        one.handle(rank, asks(1))
    for tick in range(1, 14):
        one.overdue(tick / 2)
    assert one.dead().keys() == {0}
    one.rank_ended(0, "killed by signal 9 (SIGKILL) by the launcher")
    one.rank_started(0)
    one.handle(1, register(1, 1, "stalled"))
    one.overdue(7.0)
    assert one.dead() == {}


def test_the_most_advanced_survivor_is_root() -> None:
    one = begun()
    assert one.ended(0, "killed") == []
    assert one.missing() == [] and one.register(1, register(1, 7, "rank 0 lost")) == []
    assert one.missing() == [2]
    world = world_of(one.register(2, register(1, 8, "rank 0 lost")))
    assert (world.generation, world.members, world.root, world.before) == (2, (1, 2), 2, 3)


def test_a_death_is_not_waited_for_before_the_first_world() -> None:
    one = ElasticMembership((0, 0, 1), 2, 3, PATIENCE)
    one.register(2, register())
    one.ended(0, "killed")
    assert world_of(one.register(1, register())).members == (1, 2)


def test_a_death_during_registration_opens_the_world() -> None:
    one = begun()
    one.ended(2, "killed")
    one.register(0, register(1, 5, "x"))
    assert world_of(one.ended(1, "killed, too")).members == (0,)


def test_a_joiner_waits_until_the_others_leave() -> None:
    one = begun()
    one.ended(1, "killed")
    one.register(0, register(1, 5, "x"))
    world_of(one.register(2, register(1, 5, "x")))
    one.started(1)
    assert one.register(1, register()) == [] and one.joiners() == [1]
    assert one.register(0, register(2, 9)) == [] and one.joiners() == []
    world = world_of(one.register(2, register(2, 9)))
    assert (world.members, world.root, world.before) == ((0, 1, 2), 0, 2)


def test_there_is_no_room_for_more_than_the_most() -> None:
    one = begun(3, most=3)
    assert one.joiners() == []
    small = ElasticMembership((0, 0, 0), 1, 2, PATIENCE)
    for place in range(3):
        told = small.register(place, register())
    assert world_of(told).members == (0, 1) and small.joiners() == []
    small.ended(0, "killed")
    assert world_of(small.register(1, register(1, 4, "x"))).members == (1, 2)


def test_too_few_wait_and_give_up() -> None:
    one = begun(3, least=2)
    one.ended(0, "killed")
    one.ended(1, "killed")
    assert one.register(2, register(1, 3, "x")) == []
    lines, told = one.overdue(100.0)
    assert told == [] and lines == [
        "1 of at least 2 ranks are there (--min-np); waiting for others, at most 5 s (--elastic-timeout)"
    ]
    assert one.overdue(104.0) == ([], [])
    one.started(1)
    lines, told = one.overdue(105.0)
    ((place, refused),) = told
    assert place == 2 and isinstance(refused, Refused) and "no others came within 5 s" in refused.text
    assert one.register(1, register()) == [(1, refused)]


def test_a_rank_that_crashes_again_and_again_before_the_first_world_is_not_waited_for() -> None:
    """Its first process may load for as long as it likes; those that follow do not stop the clock."""
    one = ElasticMembership((0, 0), 2, 2, PATIENCE)
    one.register(0, register())
    assert one.overdue(0.0) == ([], []) and one.overdue(100.0) == ([], [])
    one.ended(1, "killed")
    assert len(one.overdue(101.0)[0]) == 1
    one.started(1)
    assert one.overdue(103.0) == ([], [])
    one.ended(1, "killed")
    _, ((place, refused),) = one.overdue(106.0)
    assert place == 0 and isinstance(refused, Refused) and "no others came within 5 s" in refused.text


def test_who_has_ended_enters_no_world() -> None:
    """Its registration was under way. A world with it would wait for it in vain."""
    one = begun()
    one.ended(2, "killed")
    assert one.register(2, register(1, 9, "x")) == []
    one.register(0, register(1, 8, "x"))
    assert world_of(one.register(1, register(1, 8, "x"))).members == (0, 1)
    one.started(2)
    one.register(2, register())
    one.started(2)  # the end of the process before was not seen in time
    assert one.joiners() == []


def test_one_that_comes_in_time() -> None:
    one = begun(3, least=2)
    one.ended(0, "killed")
    one.ended(1, "killed")
    one.register(2, register(1, 3, "x"))
    one.overdue(100.0)
    one.started(1)
    assert world_of(one.register(1, register())).root == 2
    assert one.overdue(1000.0) == ([], [])


def test_without_a_state_the_job_is_over() -> None:
    one = begun(2)
    one.ended(0, "killed by signal 9")
    one.started(0)
    assert one.register(0, register()) == []
    ((place, refused),) = one.ended(1, "exited with code 1")
    assert place == 0 and isinstance(refused, Refused)
    assert "all ranks that had the state of the training have ended: rank 1 exited with code 1" in refused.text


def test_a_member_that_has_not_taken_over_the_state_does_not_count_as_one_that_has() -> None:
    """It was let in, and the only rank with the state died while it was sent."""
    one = begun(2)
    one.ended(1, "killed")
    one.register(0, register(1, 50, "x"))
    one.started(1)
    one.register(1, register())
    world_of(one.register(0, register(2, 60)))
    one.ended(0, "killed")
    ((_, refused),) = one.register(1, register(3, -1, "rank 0 lost"))
    assert isinstance(refused, Refused) and "the newest state" in refused.text


def test_the_end_of_the_training() -> None:
    one = begun()
    assert one.finished(0) == []
    one.register(1, register(1, 90, "a peer has ended"))
    assert one.finished(1) == [(1, Complete())] and one.complete
    assert one.register(2, register(1, 90, "x")) == [(2, Complete())]


class TestLate:
    """Processes that live and do not register: they are named, the first world begins without them, they are killed."""

    def test_the_first_world_does_not_wait_for_ever(self) -> None:
        one = ElasticMembership((0, 0, 0), 2, 3, PATIENCE)
        one.register(0, register())
        assert one.overdue(100.0) == ([], []) == one.overdue(150.0), "too few have come"
        one.register(2, register())
        lines, told = one.overdue(160.0)
        assert world_of(told).members == (0, 2)
        assert lines == ["the first world begins without rank 1, waited 60 s (--start-timeout-s)"]
        assert one.register(1, register()) == [] and one.joiners() == [1]

    def test_who_keeps_the_others_waiting_is_killed(self) -> None:
        one = begun(4)
        one.ended(1, "killed by signal 9 (SIGKILL)")
        one.register(0, register(1, 5, "x"))
        assert one.overdue(10.0) == ([], []) == one.overdue(12.9)
        cause = "(rank 1 killed by signal 9 (SIGKILL))"
        assert one.overdue(13.0) == ([f"the next world waits for ranks 2-3 since 3 s {cause}"], [])
        one.register(3, register(1, 5, "x"))
        assert one.overdue(17.9) == ([], []) and one.evicted == {}
        assert one.overdue(18.0) == ([], [])
        assert one.evicted == {2: "others waited 8.0 s for it to come to the next world"}
        assert world_of(one.ended(2, "killed")).members == (0, 3)
        one.started(2)
        assert one.evicted == {} and one.overdue(30.0) == ([], [])


class TestLeaving:
    """A host leaves the job: its processes leave the training at an agreed call, and nothing is computed twice."""

    def test_leavers_are_let_go_when_all_have_come(self) -> None:
        one = begun(3)
        assert one.dismiss([1, 2], "node2 leaves") == [] and one.leavers() == [1, 2]
        for place in (1, 2):
            assert one.register(place, register(1, 5)) == []
        told = one.register(0, register(1, 5))
        assert told[:2] == [(1, Dismissed("node2 leaves")), (2, Dismissed("node2 leaves"))]
        assert world_of(told[2:]).members == (0,)
        assert one.ended(1, "exited with code 0") == [] == one.leavers()

    def test_they_stay_while_the_others_are_too_few(self) -> None:
        one = begun(3, least=3)
        one.dismiss([1, 2], "node2 leaves")
        assert one.leavers() == [] == one.joiners()
        one.register(0, register(1, 5, "x"))
        one.register(1, register(1, 5, "x"))
        assert world_of(one.register(2, register(1, 5, "x"))).members == (0, 1, 2)

    def test_as_many_leave_as_may_in_the_order_of_their_dismissal(self) -> None:
        """Two hosts leave: none need be lost the hard way because not all of them can leave."""
        one = begun(4, least=2)
        one.dismiss([3], "node3 leaves")
        one.dismiss([1, 2], "node2 leaves")
        assert one.leavers() == [1, 3]
        told = [message for place in range(4) for message in one.register(place, register(1, 5))]
        assert told[:2] == [(1, Dismissed("node2 leaves")), (3, Dismissed("node3 leaves"))]
        assert world_of(told[2:]).members == (0, 2) and one.leavers() == []

    def test_all_may_be_on_hosts_that_leave(self) -> None:
        """One of them keeps the state, until another one has come."""
        one = begun(2)
        one.dismiss([0, 1], "both leave")
        assert one.leavers() == [0]
        one.register(0, register(1, 5))
        told = one.register(1, register(1, 5))
        assert told[0] == (0, Dismissed("both leave")) and world_of(told[1:]).members == (1,)
        assert one.leavers() == []

    def test_they_go_when_others_join(self) -> None:
        """In the same world: a newcomer takes the room of who leaves."""
        one = ElasticMembership((0, 0, -1), 2, 2, PATIENCE)
        one.register(0, register())
        world_of(one.register(1, register()))
        one.dismiss([1], "node2 leaves")
        one.started(2, 7)
        assert one.leavers() == [] and one.register(2, register()) == []
        assert (one.leavers(), one.joiners()) == ([1], [2])
        one.register(0, register(1, 5))
        told = one.register(1, register(1, 5))
        assert told[0] == (1, Dismissed("node2 leaves"))
        world = world_of(told[1:])
        assert (world.members, world.hosts, world.root) == ((0, 2), (0, 0, 7), 0)

    def test_who_has_the_newest_state_stays_until_others_have_it(self) -> None:
        one = begun(3)
        one.dismiss([2], "node2 leaves")
        one.ended(1, "killed")
        one.register(0, register(1, 5, "x"))
        world = world_of(one.register(2, register(1, 6, "x")))
        assert (world.members, world.root) == ((0, 2), 2) and one.leavers() == [2]

    def test_another_process_of_the_place_may_stay(self) -> None:
        one = begun(2)
        one.dismiss([1], "node2 leaves")
        one.ended(1, "killed")
        one.started(1, 0)
        world_of(one.register(0, register(1, 5, "x")))
        assert one.register(1, register()) == [] and (one.joiners(), one.leavers()) == ([1], [])
        assert one.dismiss([5], "no such process") == []


def test_the_limit_of_resets() -> None:
    one = begun(2, resets=1)
    one.register(0, register(1, 1, "x"))
    world_of(one.register(1, register(1, 1, "x")))
    one.register(0, register(2, 1, "x"))
    told = one.register(1, register(2, 1, "x"))
    assert [place for place, _ in told] == [0, 1]
    assert all(isinstance(one, Refused) and "1 times (--reset-limit)" in one.text for _, one in told)


def test_no_healthy_world_is_left_for_one_that_may_not_open() -> None:
    """Who comes back, and who is to leave, waits until a member is lost or the training is complete."""
    one = begun(3, resets=1)
    one.ended(2, "killed")
    one.register(0, register(1, 1, "x"))
    world_of(one.register(1, register(1, 1, "x")))
    one.started(2)
    assert one.register(2, register()) == [] and one.joiners() == []
    one.dismiss([1], "its host leaves")
    assert one.leavers() == []


def test_the_newest_state_that_no_other_had_is_not_missed() -> None:
    """Rank 0 had applied one step more, and was lost before the others had taken over its state: they compute it again."""
    one = begun(3)
    one.ended(2, "killed")
    one.register(0, register(1, 60, "x", 1))
    assert world_of(one.register(1, register(1, 59, "x", 1))).root == 0
    one.ended(0, "its host is lost")
    world = world_of(one.register(1, register(2, 59, "x", 1)))
    assert (world.generation, world.members, world.root) == (3, (1,), 1)


def test_steps_that_all_had_taken_over_are_not_done_again() -> None:
    """Rank 1 was left out of a world in which the others trained, and is the only one that is left."""
    one = begun(3)
    for place, steps in ((0, 60), (2, 60)):
        one.register(place, register(1, steps, "x", 1))
    one.ended(1, "its host is gone", certain=False)
    one.started(1)
    assert one.register(1, register(1, 59, "x", 1)) == []
    one.register(0, register(2, 60, "x", 2))
    one.ended(0, "killed")
    ((_, refused),) = one.ended(2, "killed")
    assert isinstance(refused, Refused) and "the newest state" in refused.text


def test_before_all_members_of_the_first_world_are_there_no_state_is_lost() -> None:
    """They die while they enter it; new processes begin with the same state as they."""
    one = ElasticMembership((0, 0), 2, 2, PATIENCE)
    one.register(0, register())
    world_of(one.register(1, register()))
    for place in (0, 1):
        one.ended(place, "killed")
        one.started(place)
    one.register(0, register())
    assert world_of(one.register(1, register())).generation == 2


def test_the_time_until_a_member_is_killed_begins_anew_with_each_world() -> None:
    one = ElasticMembership((0, 0, 0), 1, 3, MemberPatience(600.0, evict_s=8.0))
    for place in range(3):
        one.register(place, register())
    one.ended(0, "killed")
    one.register(1, register(1, 5, "x"))
    one.overdue(0.0)
    world_of(one.register(2, register(1, 5, "x")))
    one.register(1, register(2, 6, "x"))
    one.overdue(8.1)
    assert one.evicted == {}
    one.overdue(16.2)
    assert list(one.evicted) == [2]


class TestSessions:
    """Around it: who is told that a world has ended, and when joiners are let in."""

    def sessions(self, size: int = 2) -> Sessions:
        return Sessions(size, ThresholdFusion(), membership=ElasticMembership((0,) * size, 1, size, PATIENCE))

    def world(self, one: Sessions, ranks: tuple[int, ...], generation: int) -> Outgoing[LaunchedRank]:
        told: Outgoing[LaunchedRank] = []
        for rank in ranks:
            told = one.handle(rank, Hello(rank, (), generation, PROTOCOL, "0.1.0", 1 << 20))
        assert [message for _, message in told[: len(ranks)]] == [
            Welcome(f"world{generation}", WorldReport(generation, len(ranks)))
        ] * len(ranks)
        return told[len(ranks) :]

    def test_a_registration_tells_the_others_that_the_world_has_ended(self) -> None:
        one = self.sessions()
        one.handle(0, register())
        one.handle(1, register())
        self.world(one, (0, 1), 1)
        ((rank, lost),) = one.handle(0, register(1, 4, "its transport failed"))
        assert rank == 1 and lost == Lost((0,), "its transport failed")
        told = one.handle(1, register(1, 4, "rank 0 lost"))
        assert world_of(told).members == (0, 1)
        assert self.world(one, (0, 1), 2) == []

    def test_a_hello_for_a_world_that_has_lost_a_member(self) -> None:
        one = self.sessions()
        one.handle(0, register())
        one.handle(1, register())
        assert one.rank_ended(1, "killed") == [] and one.rank_started(1) == []
        told = one.handle(0, Hello(0, (), 1, PROTOCOL, "0.1.0", 1 << 20))
        assert told == [(0, Lost((1,), "killed"))]
        assert one.handle(0, register(1, -1, "killed")) != []  # the world of rank 0 alone
        told = one.handle(0, Hello(0, (), 1, PROTOCOL, "0.1.0", 1 << 20))
        assert told == [(0, Lost((0,), "it belongs to a newer world"))]

    def test_a_hello_that_fits_no_world_is_refused(self) -> None:
        """From a process that is no member, with ranks of its own choice, or of another version."""
        one = self.sessions(3)
        for rank in range(3):
            one.handle(rank, register())
        assert self.world(one, (0, 1, 2), 1) == []
        one.rank_ended(2, "killed")
        for rank in range(2):
            one.handle(rank, register(1, 0, "rank 2 lost"))
        one.rank_started(2)
        for hello, words in (
            (Hello(2, (), 2, PROTOCOL, "0.1.0", 1), "rank 2 cannot enter world 2 of this elastic job"),
            (Hello(1, (1,), 2, PROTOCOL, "0.1.0", 1), "rank 1 cannot enter world 2 of this elastic job"),
            (Hello(1, (), 2, PROTOCOL - 1, "0.0.9", 1), "install the same version of ddlcore for both"),
        ):
            ((rank, refused),) = one.handle(hello.rank, hello)
            assert rank == hello.rank and isinstance(refused, Refused) and words in refused.text
        assert self.world(one, (0, 1), 2) == []

    def test_one_waits_in_init_for_another_that_registers_again(self) -> None:
        one = self.sessions()
        one.handle(0, register())
        one.handle(1, register())
        assert one.handle(0, Hello(0, (), 1, PROTOCOL, "0.1.0", 1 << 20)) == []
        assert one.handle(1, register(1, -1, "it has changed its mind")) == [(0, Lost((1,), "it has changed its mind"))]

    @pytest.mark.parametrize("early", [False, True])
    def test_a_joiner_asks_the_world_to_come_to_an_agreed_call(self, early: bool) -> None:
        """Also one that registered before the world had begun."""
        one = self.sessions(3)
        one.rank_ended(2, "killed")
        one.handle(0, register())
        one.handle(1, register())
        one.rank_started(2)
        if early:
            assert one.handle(2, register()) == []
            assert self.world(one, (0, 1), 1) == [(0, CountCalls(COMMIT)), (1, CountCalls(COMMIT))]
        else:
            assert self.world(one, (0, 1), 1) == []
            assert one.handle(2, register()) == [(0, CountCalls(COMMIT)), (1, CountCalls(COMMIT))]

    def test_a_job_that_is_not_elastic_refuses(self) -> None:
        ((_, refused),) = Sessions(1, ThresholdFusion()).handle(0, register())
        assert isinstance(refused, Refused) and "ddl run --min-np N" in refused.text
        assert Sessions(1, ThresholdFusion()).handle(0, Finished(1)) == []

    def test_another_version_is_refused(self) -> None:
        ((_, refused),) = self.sessions().handle(0, Register(1, "0.0.1", 0, -1, ""))
        assert isinstance(refused, Refused) and "rank 0 runs ddlcore 0.0.1 (protocol 1)" in refused.text


def test_steps_of_a_world_that_never_began_are_forgotten() -> None:
    """Rank 2 had one step more than rank 1, and died before rank 1 had its state; the job must not end for it later."""
    one = ElasticMembership((0, 0), 1, 2, PATIENCE)
    for place in (0, 1):
        one.register(place, register())
    one.register(0, register(1, 0, "x", 1))
    assert world_of(one.register(1, register(1, 1, "x", 1))).root == 1
    one.ended(1, "killed")
    assert world_of(one.register(0, register(2, 0, "x", 1))).members == (0,)
    assert world_of(one.register(0, register(3, 0, "x", 3))).members == (0,)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_nobody_waits_for_ever_and_no_step_is_lost(data: st.DataObject) -> None:
    """Processes die, are started, register; after each move a world has opened if all that live have registered."""
    size = data.draw(st.integers(1, 4))
    one = ElasticMembership((0,) * size, 1, size, PATIENCE)
    alive = dict.fromkeys(range(size), 0)  # by place: the generation of its process
    steps = dict.fromkeys(range(size), -1)
    effective = dict.fromkeys(
        range(size), 0
    )  # by place: the last world of which it knows that all have taken over the state
    waits: set[int] = set()
    inside: set[int] = set()
    leaving: set[int] = set()
    best = -1  # steps of the last world in which all have taken over the state
    for _ in range(60):
        moves = [("register", place) for place in alive if place not in waits]
        moves += [("dismiss", place) for place in alive if place not in leaving]
        moves += [("die", place) for place in alive] + [("start", place) for place in range(size) if place not in alive]
        move, place = data.draw(st.sampled_from(moves))
        told: Outgoing[LaunchedRank] = []
        if move == "register":
            inside.discard(place)
            waits.add(place)
            told = one.register(place, register(alive[place], steps[place], "x", effective[place]))
        elif move == "die":
            told = one.ended(place, "killed")
            del alive[place]
            inside.discard(place)
            waits.discard(place)
            leaving.discard(place)
        elif move == "dismiss":
            leaving.add(place)
            told = one.dismiss([place], "its host leaves")
        else:
            one.started(place)
            alive[place], steps[place], effective[place] = 0, -1, 0
        if one.over:
            assert all(alive[place] == 0 or steps[place] < max(best, 0) for place in waits)
            return
        for gone in [place for place, message in told if isinstance(message, Dismissed)]:
            assert gone in leaving & waits
            for group in (waits, leaving):
                group.discard(gone)
            del alive[gone]
            one.ended(gone, "exited with code 0")
        told = [(place, message) for place, message in told if not isinstance(message, Dismissed)]
        if told:
            world = world_of(told)
            assert set(world.members) == waits and not inside
            assert steps[world.root] == max(steps[place] for place in waits) >= best
            inside, waits = set(world.members), set()
            for place in inside:
                alive[place] = world.generation
            root, done = steps[world.root], set()
            if data.draw(st.booleans()):  # all enter it, and take over the state
                one.began(world.generation)
                best = max(root, 0)
                for place in inside:
                    steps[place], effective[place] = best, world.generation
                # Some of them apply a step, if all of them live.
                done = data.draw(st.sets(st.sampled_from(sorted(inside)))) if data.draw(st.booleans()) else set()
            for place in done:
                steps[place] += 1
        elif waits and not inside and one.world.generation == 0:
            assert set(alive) - waits
