"""Which ranks form a world, what ends one, and what two ranks are told who wait for each other."""

from __future__ import annotations

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.coordinator.sessions import Sessions
from ddlcore.messages.coding import encode
from ddlcore.messages.observing import Probe
from ddlcore.messages.spec import PROTOCOL, Ask, Spec
from ddlcore.messages.to_coordinator import Bye, Done, Hello, Request
from ddlcore.messages.to_rank import Answer, Farewell, Lost, Refused, Stalled, Welcome
from ddlcore.runtime.patience import Patience
from ddlcore.types import DType, Kind


def hello(rank: int, ranks: tuple[int, ...], ordinal: int = 1, protocol: int = PROTOCOL) -> Hello:
    return Hello(rank, ranks, ordinal, protocol, "0.1.0", 1 << 20)


def sessions(size: int) -> Sessions:
    return Sessions(size, ThresholdFusion(), Patience(warning_s=10.0))


def ask(name: str) -> Ask:
    return Ask(0, name, encode(Spec(Kind.ALLREDUCE, DType.F32, (2,))))


def test_a_world_begins_when_all_are_there() -> None:
    """Nobody is welcomed before the last; then everybody is, into the same world."""
    one = sessions(3)
    assert one.handle(0, hello(0, (0, 1, 2))) == []
    assert one.handle(2, hello(2, (0, 1, 2))) == []
    welcomes = one.handle(1, hello(1, (0, 1, 2)))
    assert sorted(to for to, _ in welcomes) == [0, 1, 2]
    assert len({message for _, message in welcomes}) == 1
    assert isinstance(welcomes[0][1], Welcome)


def test_worlds_of_some_ranks_run_beside_each_other() -> None:
    """Two worlds of two: messages of one never reach the other, and ranks are numbered within each."""
    one = sessions(4)
    for rank in (3, 1):
        told = one.handle(rank, hello(rank, (3, 1)))
    assert [to for to, _ in told] == [3, 1]
    one.handle(3, Request(0, 1, (ask("x"),)))
    told = one.handle(1, Request(0, 1, (ask("x"),)))
    assert sorted(to for to, _ in told) == [1, 3]
    for rank in (0, 2):
        told = one.handle(rank, hello(rank, (0, 2)))
    assert sorted(to for to, _ in told) == [0, 2]


def test_ranks_that_wait_for_each_other_in_different_worlds_are_told() -> None:
    """A cycle of waits is refused on all its ranks; a wait that patience solves is not."""
    one = sessions(3)
    assert one.handle(0, hello(0, (0, 1))) == []
    assert one.handle(2, hello(2, (0, 1, 2))) == []  # waits for 0, which waits for 1: 1 may yet come
    told = one.handle(1, hello(1, (0, 1, 2)))
    assert sorted(to for to, _ in told) == [0, 1, 2]
    assert all(isinstance(message, Refused) and "rank 0 asked for ranks [0, 1]" in message.text for _, message in told)


def test_a_rank_that_dies_before_its_world_began() -> None:
    """Those who wait for it are told at once, those who come later too."""
    one = sessions(3)
    one.handle(0, hello(0, (0, 1, 2)))
    assert one.rank_ended(1, "killed by signal 9 (SIGKILL)") == [
        (0, Lost((1,), "killed by signal 9 (SIGKILL), before init was complete"))
    ]
    ((to, message),) = one.handle(2, hello(2, (0, 1, 2)))
    assert to == 2
    assert isinstance(message, Lost)
    assert one.lost() == {1: "killed by signal 9 (SIGKILL)"}


def test_leaving_is_no_fault_and_dying_is() -> None:
    """Bye and Done, then the end of the process: nobody is told. Bye without Done: a promise may be unkept."""
    for done in (True, False):
        one = sessions(2)
        for rank in range(2):
            one.handle(rank, hello(rank, (0, 1)))
        assert (1, Farewell()) in one.handle(1, Bye("called shutdown()"))
        if done:
            assert one.handle(1, Done()) == []
        told = one.rank_ended(1, "exited with code 0")
        assert bool(told) is not done
        assert bool(one.lost()) is not done


def test_a_world_may_begin_again() -> None:
    """shutdown and init, a second time: the old world's end does not disturb the new one."""
    one = sessions(2)
    for ordinal in (1, 2, 3):
        for rank in range(2):
            told = one.handle(rank, hello(rank, (0, 1), ordinal))
        assert len(told) == 2
        for rank in range(2):
            one.handle(rank, Bye("called shutdown()"))
            one.handle(rank, Done())


def test_who_gives_up_is_told_who_was_missing() -> None:
    """After its own deadline a rank asks to leave, and learns the names."""
    one = sessions(3)
    one.handle(0, hello(0, (0, 1, 2)))
    ((to, message),) = one.handle(0, Bye("gave up"))
    assert to == 0
    assert isinstance(message, Refused)
    assert "rank 1, 2 of [0, 1, 2]" in message.text


def test_all_who_wait_for_a_world_give_up_with_the_first() -> None:
    """At its deadline; each then names the ranks that have not come, and none the first one, whose process ends."""
    one = sessions(4)
    for rank in (0, 1):
        one.handle(rank, hello(rank, (0, 1, 2)))
    one.handle(3, hello(3, (2, 3)))  # waits for another world, and goes on waiting
    text = "rank 2 of [0, 1, 2] had not called init() by then; waited 3 s (DDL_START_TIMEOUT_S)"
    told = one.handle(1, Bye("gave up", waited_s=3.0))
    assert told == [(0, Refused(text, late=True)), (1, Refused(text, late=True))]
    assert one.handle(0, Bye("gave up", waited_s=3.0)) == [(0, Farewell())], "its own deadline passed meanwhile"
    assert one.rank_ended(1, "exited with code 1") == []
    assert [to for to, told in one.handle(2, hello(2, (2, 3))) if isinstance(told, Welcome)] == [2, 3]


def test_who_leaves_for_a_reason_of_its_own_leaves_alone() -> None:
    """Ctrl-C in init is no deadline: the others wait, and hear the reason when the process ends."""
    one = sessions(3)
    for rank in (0, 1):
        one.handle(rank, hello(rank, (0, 1, 2)))
    assert [to for to, _ in one.handle(1, Bye("init failed: KeyboardInterrupt"))] == [1]
    assert one.rank_ended(1, "exited with code 130") == [
        (0, Lost((1,), "exited with code 130, before init was complete"))
    ]


def test_another_protocol_is_refused_by_name() -> None:
    """Two versions of ddl do not meet; the message says which."""
    ((_, message),) = sessions(2).handle(0, hello(0, (0, 1), protocol=PROTOCOL + 1))
    assert isinstance(message, Refused)
    assert "install the same version" in message.text


def test_a_launch_that_cannot_begin_is_refused_on_every_rank() -> None:
    """When all have come, so that none is left waiting; also in the next try."""
    one = Sessions(2, ThresholdFusion(), refuses="autotune: no")
    for ordinal in range(2):
        assert one.handle(1, hello(1, (0, 1), ordinal)) == []
        assert one.handle(0, hello(0, (0, 1), ordinal)) == [(1, Refused("autotune: no")), (0, Refused("autotune: no"))]


def test_a_stall_is_reported_once_with_names_and_ranks() -> None:
    """After warning time: the tensor, and who lacks it; not again in the next second."""
    one = sessions(2)
    for rank in range(2):
        one.handle(rank, hello(rank, (0, 1)))
    told = one.handle(0, Request(0, 1, (ask("late"),)))
    assert isinstance(told[0][1], Answer)
    assert watched(one, 0, 10) == []
    (report,) = one.overdue(10.5)
    assert report.splitlines()[1:3] == [
        "  tensor  ready on  missing ranks  waits s",
        "  late    0         1                 10.5",
    ]
    assert watched(one, 11, 60) == []


def watched(one: Sessions, begin_s: int, end_s: int) -> list[str]:
    """What is reported in this time, looked at once a second."""
    return [text for second in range(begin_s, end_s) for text in one.overdue(float(second))]


def test_time_in_which_nobody_watched_does_not_count() -> None:
    """The launcher was stopped, and the ranks may have been stopped with it: no report, and no end, when all go on."""
    one = Sessions(2, ThresholdFusion(), Patience(warning_s=10.0, shutdown_s=20.0))
    for rank in range(2):
        one.handle(rank, hello(rank, (0, 1)))
    one.handle(0, Request(0, 1, (ask("late"),)))
    assert watched(one, 0, 5) == []
    assert watched(one, 3600, 3605) == []
    assert all(isinstance(told, Probe) for _, told in one.due())
    assert len(watched(one, 3605, 3615)) == 1


def test_ranks_that_have_not_come_to_init_are_reported_and_end_the_job() -> None:
    """Who is there is told; who is not is named, as are the ranks that the launcher has to kill."""
    one = Sessions(3, ThresholdFusion(), Patience(warning_s=10.0, shutdown_s=20.0))
    one.handle(0, hello(0, (0, 1, 2)))
    one.handle(2, hello(2, (0, 1, 2)))
    (report,) = watched(one, 0, 15)
    assert report.splitlines() == [
        "stalled for more than 10 s in init():",
        "  ranks 0,2 called init() and wait for the others",
        "  rank 1 does not answer at all: no message from it so far, and it was last asked to call init(); it may be "
        "stopped, or busy with what comes before its init()",
    ]
    assert watched(one, 15, 25) == []
    ends = [(rank, told) for rank, told in one.due() if isinstance(told, Stalled)]
    assert [rank for rank, _ in ends] == [0, 2]
    assert list(one.dead()) == [1]
    assert watched(one, 25, 60) == []


def test_a_rank_that_is_silent_in_shutdown_is_reported_and_ends_the_job() -> None:
    """It has said goodbye and has not let go of everything. One that has not said goodbye is reported alone."""
    for goodbye in (True, False):
        one = Sessions(2, ThresholdFusion(), Patience(warning_s=10.0, shutdown_s=20.0))
        for rank in range(2):
            one.handle(rank, hello(rank, (0, 1)))
        one.handle(0, Bye("called shutdown()"))
        one.handle(0, Done())
        if goodbye:
            one.handle(1, Bye("called shutdown()"))
        (report,) = watched(one, 0, 15)
        assert "rank 1 does not answer at all" in report
        assert watched(one, 15, 60) == []
        assert list(one.dead()) == ([1] if goodbye else [])
