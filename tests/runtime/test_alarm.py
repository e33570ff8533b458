"""A rank notices by itself that it is in one thing for long, and says when it is no more; time that nobody watched is none."""

from __future__ import annotations

from msgspec import structs

from ddlcore.messages.observing import Busy, ReplayStatus
from ddlcore.runtime.alarm import Alarm
from ddlcore.runtime.clock import WatchedTime
from ddlcore.runtime.patience import Patience

AT = ReplayStatus(3, 12, True, 0, ("a",))
BUSY = Busy("allreduce 'x'", 4, 0, ("x",))


def looks(alarm: Alarm, doing: ReplayStatus | Busy | None, begin_s: int, end_s: int) -> list[ReplayStatus | Busy]:
    return [one for second in range(begin_s, end_s) for one in alarm.look(lambda: doing, float(second))]


def test_an_alarm_comes_once_before_the_first_limit_and_is_taken_back_once() -> None:
    """Early enough for the others to be asked; with how long it has lasted. Of a bucket of a schedule and of a decided one."""
    for doing in (AT, BUSY):
        alarm = Alarm(Patience(warning_s=10.0, shutdown_s=20.0))
        assert looks(alarm, doing, 1, 9) == []
        (said,) = looks(alarm, doing, 9, 30)
        assert said.waits_s == 8.0
        (over,) = looks(alarm, None, 30, 60)
        taken_back = over.moved if isinstance(over, ReplayStatus) else over.over
        assert taken_back
        assert looks(alarm, doing, 60, 68) == [], "another wait begins at zero"


def test_a_rank_that_goes_on_gives_no_alarm() -> None:
    """However long it takes for all of it."""
    alarm = Alarm(Patience(warning_s=10.0))
    for place in range(20):
        assert looks(alarm, structs.replace(AT, place=place), 5 * place, 5 * place + 5) == []


def test_without_limits_there_is_no_alarm() -> None:
    """0 s: never."""
    assert looks(Alarm(Patience(0.0, 0.0)), AT, 0, 1000) == []


def test_who_asks_to_leave_says_how_long_it_has_waited() -> None:
    """Of the place where it stands; of another, nothing is known."""
    alarm = Alarm(Patience(warning_s=60.0))
    looks(alarm, AT, 1, 6)
    assert alarm.since(AT) == structs.replace(AT, waits_s=4.0)
    assert alarm.since(structs.replace(AT, place=13)) == structs.replace(AT, place=13)
    assert alarm.since(None) is None


def test_a_gap_in_which_nobody_looked_does_not_count() -> None:
    """The process was stopped, or the machine suspended; whatever the others did meanwhile was not seen."""
    time = WatchedTime()
    assert [time.at(now_s) for now_s in (100.0, 101.0, 103.0)] == [0.0, 1.0, 3.0]
    assert time.at(10_000.0) < 4.0
    assert time.at(10_001.0) < 5.0
