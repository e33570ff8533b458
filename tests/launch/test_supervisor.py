"""What the supervisor of an elastic job does after an end: it starts a rank again, ends the others, or waits."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ddlcore.launch.ranks.exit_status import End
from ddlcore.launch.ranks.supervisor import LOST, Supervisor


class Rank:
    """A rank that an agent runs; it ends only if the test says so."""

    process = None

    def __init__(self, rank: int, ends: Callable[[], None] = lambda: None) -> None:
        self.rank = rank
        self.sent: list[int] = []
        self._ends = ends

    def signal(self, number: int) -> None:
        self.sent.append(number)

    def signal_group(self, number: int) -> None:
        self.sent.append(number)
        self._ends()

    def leaves_group(self) -> bool:
        return False


class Policy:
    """Starts a rank again after each of its first ``restarts`` ends, and says nothing else."""

    over = False

    def __init__(self, restarts: int = 0) -> None:
        self._restarts = restarts

    def delay_s(self, end: End) -> float | None:
        self._restarts -= 1
        return 0.0 if self._restarts >= 0 else None

    def otherwise(self, end: End) -> str:
        return "it is not started again"

    def is_done(self, running: object) -> bool:
        return False

    def has_failed(self, running: object) -> bool:
        return False

    @property
    def expects(self) -> bool:
        return False


class Job:
    """A supervisor of two ranks, the ends that it has told, and the ranks that it has started."""

    def __init__(self, policy: Policy, grace_s: float = 60.0) -> None:
        self.told: list[End] = []
        self.begun: list[int] = []
        self.code_again = 0  # with which a rank that is started again ends at once
        self.ranks = [Rank(rank, partial(self.end, rank, -15)) for rank in (0, 1)]
        self.supervisor = Supervisor(
            self.ranks,
            grace_s=grace_s,
            ended=self.told.append,
            say=lambda text: None,
            revival=policy,
            begin=self._begin,
        )

    def _begin(self, rank: int) -> Rank:
        self.begun.append(rank)
        self.end(rank, self.code_again)
        return Rank(rank)

    def end(self, rank: int, code: int, lost: str = "") -> None:
        self.supervisor.ended_on_host(rank, code, lost)

    def end_later(self, rank: int, code: int) -> None:
        """End ``rank`` in a turn after the next one, in which the supervisor obeys signals."""
        self.supervisor.do(partial(self.supervisor.do, partial(self.end, rank, code)))


def test_why_a_rank_was_killed_is_not_said_of_the_process_that_followed() -> None:
    """It ended by itself just before it could be killed, and was started again."""
    job = Job(Policy(restarts=1))
    job.code_again = -9
    job.supervisor.kill_silent(0, "others waited for it")
    job.supervisor.do(partial(job.end, 0, 1))
    job.supervisor.do(partial(job.end, 1, 0))
    job.supervisor.run()
    assert [(end.rank, end.returncode, end.silent) for end in job.told] == [(0, 1, ""), (1, 0, ""), (0, -9, "")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_ranks_that_a_signal_to_the_launcher_ends_are_not_started_again(number: signal.Signals) -> None:
    """As by a batch system that cancels the job before the script has installed handlers; not for any other signal."""
    job = Job(Policy(restarts=2))
    job.supervisor.deliver(number)
    for rank in (0, 1):
        job.end_later(rank, -number)
    job.supervisor.run()
    assert [rank.sent for rank in job.ranks] == [[number], [number]]
    assert job.begun == ([0, 1] if number == signal.SIGUSR1 else [])
    assert [end.returncode for end in job.told] == [-number, -number, *[0 for _ in job.begun]]


def test_an_end_by_the_same_signal_long_after_does_not_follow_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks have handled SIGTERM; an hour later, one of them is ended by SIGTERM of another program."""
    monkeypatch.setattr("ddlcore.launch.ranks.supervisor._WISH_S", 0.0)
    job = Job(Policy(restarts=1))
    job.supervisor.deliver(signal.SIGTERM)
    job.end_later(0, -15)
    job.end_later(1, 0)
    job.supervisor.run()
    assert job.begun == [0]


def test_who_still_loads_is_ended_when_no_world_can_open() -> None:
    """It would notice it when it registers, after many minutes perhaps, or never."""

    class Over(Policy):
        over = True

        def has_failed(self, running: object) -> bool:
            return True

    job = Job(Over(), grace_s=0.01)
    job.end(0, 1)
    job.supervisor.run()
    assert [rank.sent for rank in job.ranks] == [[], [signal.SIGTERM]]
    assert [(end.rank, end.stopped) for end in job.told] == [(0, False), (1, True)]


def test_a_job_waits_for_a_host_that_is_being_called() -> None:
    class Expects(Policy):
        looks = 0

        @property
        def expects(self) -> bool:
            self.looks += 1
            job.supervisor.do(lambda: None)  # the thread that looks at hosts does so once a second
            return self.looks < 3

    policy = Expects()
    job = Job(policy)
    for rank in (0, 1):
        job.end(rank, LOST, "its host is gone")
    job.supervisor.run()
    assert policy.looks == 3 and job.begun == []


def test_who_waits_for_the_end_of_a_complete_training_does_not_spin() -> None:
    asked: list[object] = []

    class Done(Policy):
        over = True

        def is_done(self, running: object) -> bool:
            asked.append(running)
            return True

    job = Job(Done())
    job.ranks[0]._ends = job.ranks[1]._ends = lambda: None  # they take their time

    def end() -> None:
        job.end(0, -15)
        job.end(1, -15)

    timer = threading.Timer(0.2, end)
    timer.start()
    job.supervisor.do(lambda: None)
    job.supervisor.run()
    timer.join()
    assert len(asked) == 1


def test_a_process_that_runs_is_not_started_a_second_time() -> None:
    """A launcher and its successor may both have wanted it."""
    job = Job(Policy())
    job.supervisor.start(0)
    for rank in (0, 1):
        job.supervisor.do(partial(job.end, rank, 0))
    job.supervisor.run()
    assert job.begun == [] and len(job.told) == 2


class InTheKernel(Rank):
    """A rank of this host that SIGKILL does not end, as while it reads a file of a server that is gone."""

    def __init__(self) -> None:
        super().__init__(0)
        self.process: subprocess.Popen[bytes] | None = subprocess.Popen(["sleep", "60"])  # type: ignore[assignment]


@pytest.fixture
def hanging() -> Iterator[InTheKernel]:
    rank = InTheKernel()
    assert rank.process is not None
    yield rank
    rank.process.kill()
    rank.process.wait()


@pytest.mark.parametrize("has_pidfd", [True, False])
@pytest.mark.parametrize("by_agent", [False, True])
def test_a_rank_that_cannot_be_killed_is_given_up(
    hanging: InTheKernel, by_agent: bool, has_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for it for ever. Its end, if it comes after all, is not that of the process that follows."""
    monkeypatch.setattr("ddlcore.launch.ranks.supervisor._HANGS_AFTER_S", 0.05)
    if not has_pidfd:
        monkeypatch.setattr("ddlcore.control.liveness.open_pidfd", lambda pid: -1)
    told: list[End] = []
    texts: list[str] = []
    begun = threading.Event()

    def begin(rank: int) -> Rank:
        begun.set()
        return Rank(rank)

    supervisor = Supervisor(
        [hanging], grace_s=60.0, ended=told.append, say=texts.append, revival=Policy(restarts=1), begin=begin
    )
    if by_agent:
        supervisor.order(0, signal.SIGKILL, True)
    else:
        supervisor.kill_silent(0, "others waited for it")
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    assert begun.wait(20.0)
    assert hanging.process is not None
    hanging.process.kill()
    hanging.process.wait()
    supervisor.do(partial(supervisor.ended_on_host, 0, 0))
    thread.join(20.0)
    assert [(end.returncode, end.silent) for end in told] == [(-9, "" if by_agent else "others waited for it"), (0, "")]
    assert "rank 0 cannot be ended by SIGKILL" in texts[0] and hanging.sent == [signal.SIGKILL]


def test_a_rank_of_another_user_is_not_given_up(hanging: InTheKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL has not reached it, so it may go on and must not count as dead. Its end is waited for."""
    monkeypatch.setattr("ddlcore.launch.ranks.supervisor._HANGS_AFTER_S", 0.05)
    asked = threading.Event()

    def kill(pid: int, number: int) -> None:
        asked.set()
        raise PermissionError

    monkeypatch.setattr("ddlcore.launch.ranks.supervisor.os.kill", kill)
    told: list[End] = []
    supervisor = Supervisor([hanging], grace_s=60.0, ended=told.append, say=lambda text: None, revival=Policy())
    supervisor.kill_silent(0, "others waited for it")
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    assert asked.wait(20.0)
    assert told == []
    monkeypatch.undo()
    assert hanging.process is not None
    hanging.process.terminate()
    thread.join(20.0)
    assert [(end.returncode, end.silent) for end in told] == [(-15, "")]
