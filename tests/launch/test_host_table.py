"""On which hosts the processes of an elastic job run: hosts come, leave, fail and come back."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ddlcore.contracts.launcher import HostSlots
from ddlcore.launch.job.host_table import CallHost, Dismiss, HostTable, Start
from tests.runtime.effort import examples


def slots(**hosts: int) -> list[HostSlots]:
    return [HostSlots(name, count) for name, count in hosts.items()]


def test_nothing_to_do() -> None:
    assert HostTable(slots(a=2, b=2), (0, 0, 1, 1), 4, 4, (60.0, 600.0)).decide(0.0) == []


def test_a_new_host_is_called_and_then_used() -> None:
    table = HostTable(slots(a=2), (0, 0), 8, 4, (60.0, 600.0))
    table.found(slots(a=2, b=3))
    assert table.decide(0.0) == [CallHost(1)] and table.decide(1.0) == []
    table.reached(1)
    assert table.decide(2.0) == [Start(2, 1), Start(3, 1)], "no more than 4 run"
    assert [table.name_of(place) for place in range(5)] == ["a", "a", "b", "b", ""]


def test_no_more_hosts_are_called_than_needed() -> None:
    table = HostTable(slots(a=1), (0,), 8, 3, (60.0, 600.0))
    table.found(slots(a=1, b=2, c=2))
    assert table.decide(0.0) == [CallHost(1)]
    table.lost(1, 1.0)
    assert table.decide(1.0) == [CallHost(2)], "another one instead"


def test_a_host_that_leaves() -> None:
    table = HostTable(slots(a=2, b=2), (0, 0, 1, 1), 8, 4, (60.0, 600.0))
    table.found(slots(a=2, c=2))
    assert table.decide(0.0) == [Dismiss((2, 3), "b leaves the job"), CallHost(2)]
    table.reached(2)
    assert table.decide(1.0) == [Start(4, 2), Start(5, 2)], "before those that leave have ended"
    for place in (2, 3):
        table.ended(place, True)
    assert table.decide(2.0) == []
    table.found(slots(a=1, b=2, c=2))
    assert table.decide(3.0) == [Dismiss((1,), "a takes no more than 1 now"), Start(2, 1)], "it is still reached"


def test_a_lost_host_comes_back_after_its_cooldown() -> None:
    """Each time after twice as long a time, up to the longest."""
    table = HostTable(slots(a=1, b=2), (0, 1, 1), 3, 3, (10.0, 30.0))
    now_s = 100.0
    for wait_s in (10.0, 20.0, 30.0, 30.0):
        for place in (1, 2):
            table.ended(place, False)
        table.lost(1, now_s)
        assert table.decide(now_s + wait_s - 0.1) == []
        now_s += wait_s
        assert table.decide(now_s) == [CallHost(1)]
        table.reached(1)
        assert table.decide(now_s) == [Start(1, 1), Start(2, 1)]
    now_s += 100.0
    table.lost(1, now_s)
    for place in (1, 2):
        table.ended(place, False)
    assert table.decide(now_s + 10.0) == [CallHost(1)], "it was there for long"


def test_processes_that_fail_too_often() -> None:
    """The host is left out, and others take the place."""
    table = HostTable(slots(a=1, b=2), (0, 1), 2, 2, (10.0, 30.0))
    table.failed(0, 0.0)
    assert table.decide(0.0) == [Start(0, 1)]
    table.failed(0, 1.0)
    assert table.decide(9.0) == [] and table.decide(10.0) == [Start(0, 0)]


def test_ranks_that_fail_at_the_same_time_are_one_failure_of_their_host() -> None:
    table = HostTable(slots(a=3, b=1), (0, 0, 0), 3, 3, (10.0, 30.0))
    for place in range(3):
        table.failed(place, 0.1 * place)
    assert table.hosts[0].blocked_until_s == 10.2
    table.failed(0, 10.5)
    assert table.hosts[0].blocked_until_s == 30.5


def test_who_was_dismissed_is_leaving_until_its_process_has_ended() -> None:
    table = HostTable(slots(a=1, b=1), (0, 1), 4, 2, (10.0, 30.0))
    table.found(slots(a=1))
    table.decide(0.0)
    assert [table.is_leaving(place) for place in range(2)] == [False, True]
    table.ended(1, False)
    assert not table.is_leaving(1) and table.decide(1.0) == []


def test_a_process_that_has_succeeded_is_not_started_again() -> None:
    table = HostTable(slots(a=2), (0, 0), 4, 4, (10.0, 30.0))
    table.ended(1, True)
    assert table.decide(0.0) == [Start(2, 0)], "but another one may use the slot"


def test_an_agent_says_that_its_host_leaves() -> None:
    table = HostTable(slots(a=1, b=1), (0, 1), 2, 2, (10.0, 30.0))
    table.leaves(1)
    assert table.decide(0.0) == [Dismiss((1,), "b leaves the job")]


@examples(20)
@given(st.data())
def test_no_host_and_no_job_has_too_many(data: st.DataObject) -> None:
    """Whatever happens: places are used by one process at a time, hosts within their slots, the job within its limit."""
    most = data.draw(st.integers(1, 5))
    table = HostTable(slots(a=2), (0,), 2 * most, most, (5.0, 20.0))
    running, leaving = {0: 0}, set[int]()
    calls: set[int] = set()
    for now_s in itertools.islice(itertools.count(0.0, 1.0), 60):
        move = data.draw(st.sampled_from(["found", "reached", "lost", "ended", "failed", "wait"]))
        if move == "found":
            table.found(slots(**data.draw(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3)))))
        elif move in ("reached", "lost") and calls:
            called = data.draw(st.sampled_from(sorted(calls)))
            calls.discard(called)
            table.reached(called) if move == "reached" else table.lost(called, now_s)
        elif move in ("ended", "failed") and running:
            place = data.draw(st.sampled_from(sorted(running)))
            table.failed(place, now_s) if move == "failed" else table.ended(place, place in leaving)
            del running[place]
            leaving.discard(place)
        for decision in table.decide(now_s):
            if isinstance(decision, CallHost):
                assert decision.host not in calls and not table.hosts[decision.host].reached
                calls.add(decision.host)
            elif isinstance(decision, Start):
                assert decision.place not in running and table.hosts[decision.host].reached
                running[decision.place] = decision.host
            else:
                leaving.update(decision.places)
        assert leaving <= running.keys() and len(running.keys() - leaving) <= most
        for index, host in enumerate(table.hosts):
            staying = [place for place, at in running.items() if at == index and place not in leaving]
            assert len(staying) <= host.slots
        assert table.decide(now_s) == []
