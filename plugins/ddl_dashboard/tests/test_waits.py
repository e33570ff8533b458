"""Who waits for whom, from what the ranks say."""

from __future__ import annotations

import pytest
from ddl_dashboard.waits import LastReport, Wait, waits_of
from ddl_doctor.reports import Activity


def told(waits_s: float, *names: str, more: int = 0, silent: bool = False, ranks: tuple[int, ...] = ()) -> LastReport:
    in_flight = tuple((name, ranks) for name in names)
    return LastReport(Activity("", waits_s=waits_s, in_flight=in_flight, pending=len(names) + more), silent)


def test_a_rank_that_lacks_what_others_have() -> None:
    """It is missing, whatever it does meanwhile."""
    assert waits_of({0: told(2.0, "a", "b"), 1: told(0.0), 2: told(3.0, "a", "b")}) == [
        Wait(("a", "b"), 0, (0, 2), (1,), 3.0)
    ]


def test_nobody_waits_for_long() -> None:
    """What is in flight for less than a second is no wait."""
    assert waits_of({0: told(0.5, "a"), 1: told(0.0)}) == []
    assert waits_of({0: told(0.0), 1: told(0.0)}) == []
    assert waits_of({}) == []


def test_ranks_that_wait_for_each_other() -> None:
    """By different names: a row for each."""
    assert waits_of({0: told(2.0, "a"), 1: told(1.0, "b")}) == [
        Wait(("a",), 0, (0,), (1,), 2.0),
        Wait(("b",), 0, (1,), (0,), 1.0),
    ]


def test_a_rank_that_does_not_answer() -> None:
    """It counts as missing even if it had submitted the operation when it spoke last."""
    assert waits_of({0: told(2.0, "a"), 1: told(0.0, "a", silent=True)}) == [Wait(("a",), 0, (0,), (1,), 2.0)]


def test_names_that_were_cut() -> None:
    """A rank with many operations names only the first; what comes behind these may be among the others."""
    few = told(2.0, "m", "z")
    many = told(0.0, "a", "n", more=5)
    assert waits_of({0: few, 1: many}) == [Wait(("m",), 0, (0,), (1,), 2.0)]
    assert waits_of({0: told(2.0, "m", more=7), 1: told(0.0)})[0].more == 7


def test_the_network_holds_all_up() -> None:
    """Only after a while: a large bucket needs some time."""
    assert waits_of({0: told(2.9, "a"), 1: told(9.0, "a")}) == []
    assert waits_of({0: told(3.0, "a"), 1: told(9.0, "a")}) == [Wait(("a",), 0, (0, 1), (), 9.0)]


@pytest.mark.parametrize(("members", "missing"), [((0, 1), (1,)), ((), (1, 2))])
def test_only_members_of_the_process_set_are_missing(members: tuple[int, ...], missing: tuple[int, ...]) -> None:
    waits = waits_of({0: told(2.0, "a", ranks=members), 1: told(0.0), 2: told(0.0)})
    assert [wait.missing for wait in waits] == [missing]
