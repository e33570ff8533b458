"""What the doctor does when ranks cannot be had as it wants them: it goes on with what is left, and says so."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
from ddl_doctor.doctor import examining
from ddl_doctor.doctor.examining import examine
from ddl_doctor.doctor.links import Clock, MeasuredLinks, Pair
from ddl_doctor.doctor.looking import Looks
from ddl_doctor.doctor.rank import RankAnswer, doctor_rank
from ddl_doctor.doctor.subject import ExaminedJob, Question, subject_of

from ddlcore.commands.cli import main
from ddlcore.config.loading import Settings
from ddlcore.errors import DeadlineExceeded, RankFailed
from ddlcore.launch.ranks.exit_status import NotStarted

Answer = BaseException | MeasuredLinks | str  # what is raised; what was measured; why nothing was


@pytest.fixture
def subject() -> ExaminedJob:
    return subject_of(None, "node1:1,node2:1", None, {"backend": "gloo"}, {"PATH": os.environ["PATH"]})


def played(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> list[tuple[tuple[str, ...], bool]]:
    """Each start of ranks gets the next answer; returns the hosts of each, and whether something was to be measured."""
    left, starts = list(answers), list[tuple[tuple[str, ...], bool]]()

    def run_placed(placed: Any, *rest: Any, **more: Any) -> list[RankAnswer]:
        _, arguments, _ = rest[3]
        starts.append((placed.layout.hosts, arguments[0]))
        answer = left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        facts = {"versions": {"ddlcore": "0.1.0"}}
        return [
            RankAnswer(
                Looks(rank, 0, dict(facts)),
                {},
                answer if isinstance(answer, MeasuredLinks) else None,
                answer if isinstance(answer, str) else "",
            )
            for rank in range(placed.layout.size)
        ]

    monkeypatch.setattr(examining, "run_placed", run_placed)
    return starts


needs_gloo = pytest.mark.skipif(
    importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo, which spans hosts, is not installed"
)
pytestmark = needs_gloo


def test_a_host_that_cannot_take_part(monkeypatch: pytest.MonkeyPatch, subject: ExaminedJob) -> None:
    """A finding with its fix; the others are looked at without it."""
    problems = {"node2": ["numpy 1.26 there, 2.1 here", "it does not accept our key; try `ssh node2 true`"]}
    starts = played(monkeypatch, NotStarted("nothing was started", hosts=problems), "")
    report = examine(subject, Question(), lambda text: None)
    assert starts == [(("node1", "node2"), True), (("node1",), False)]
    assert [(one.check, one.where, one.fix.partition(" works")[0]) for one in report.findings] == [
        ("hosts", "node2", "on node2: pip install numpy==2.1"),
        ("hosts", "node2", "see that `ssh node2 true`"),
    ]
    assert [line.words for line in report.lines if line.check == "hosts"] == ["1 of 2 can take part"]
    assert report.code == 1


def test_no_host_is_left(monkeypatch: pytest.MonkeyPatch, subject: ExaminedJob) -> None:
    """There is a report all the same."""
    problems = {
        "node1": ["Python 3.9 runs there and 3.11 here"],
        "node2": ["ddlcore 9.1 is installed there and 0.1 here"],
    }
    played(monkeypatch, NotStarted("nothing was started", hosts=problems))
    report = examine(subject, Question(), lambda text: None)
    assert [one.fix.partition(":")[0] for one in report.findings] == [
        "put the same Python at the same path on node1",
        "install ddlcore 0.1.0 on node2; or share one environment, at the same path, by a file system",
    ]


def test_a_rank_that_dies_while_it_measures(monkeypatch: pytest.MonkeyPatch, subject: ExaminedJob) -> None:
    """What can be looked at is; and the links are a finding."""
    starts = played(monkeypatch, RankFailed(1, "rank 1 was killed by signal 11\n  more"), "")
    report = examine(subject, Question(), lambda text: None)
    assert [measures for _, measures in starts] == [True, False]
    (found,) = report.findings
    assert found.what == "the ranks could not meet: rank 0: rank 1 was killed by signal 11"
    assert next(line for line in report.lines if line.check == "versions").state == "ok"


def test_a_rank_that_hangs_while_it_measures(monkeypatch: pytest.MonkeyPatch, subject: ExaminedJob) -> None:
    """The stall ends in time whatever the user set, and fails the ranks that wait: so that the one that hangs is ended, too."""
    patience_s: list[float] = []

    def run_placed(placed: Any, settings: Settings, *rest: Any, **more: Any) -> list[RankAnswer]:
        patience_s.append(settings.number("stall_shutdown_s"))
        return [RankAnswer(Looks(rank, 0), {}, None, "nothing") for rank in range(2)]

    monkeypatch.setattr(examining, "run_placed", run_placed)
    examine(subject, Question(), lambda text: None)
    assert patience_s == [examining.STALL_S]

    def stalled(*arguments: Any) -> MeasuredLinks:
        raise DeadlineExceeded("stalled for more than 120 s")

    monkeypatch.setattr("ddl_doctor.doctor.pairs.measure_links", stalled)
    for name in ("init", "shutdown", "current_job"):
        monkeypatch.setattr(f"ddlcore.api.{name}", lambda: None)
    monkeypatch.setattr("ddl_doctor.doctor.rank.look", lambda checks, view: Looks(0, 0))
    with pytest.raises(DeadlineExceeded, match="120 s"):
        doctor_rank(True, (), {"DDL_RANK": "0", "DDL_HOST_INDEXES": "0,0", "DDL_JOB_FILE": "/nowhere"})


def test_ranks_that_cannot_be_had_at_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Then there is no report, and exit code 2."""
    played(monkeypatch, RankFailed(0, "rank 0 exited with code 1"), RankFailed(0, "rank 0 exited with code 1"))
    assert main(["doctor", "-np", "2"]) == 2
    assert capsys.readouterr().err == "ddl doctor: rank 0 exited with code 1\n"


def test_what_was_measured(monkeypatch: pytest.MonkeyPatch, subject: ExaminedJob) -> None:
    """Matrices, the slow link and the clock, each in its line."""
    pairs = [Pair(0, 1, 100.0, 0.01), Pair(1, 0, 100.0, 0.012)]
    played(monkeypatch, MeasuredLinks((0, 1), {"gloo": pairs}, [Clock(1, 2.5, 0.001)]))
    report = examine(subject, Question(model_mb=50.0), lambda text: None)
    assert [one.check for one in report.findings] == ["links", "clocks"]
    assert "50 MB of gradients" in report.findings[0].means
    assert [matrix.title for matrix in report.matrices] == [
        "gloo: latency between ranks",
        "gloo: bandwidth between ranks",
    ]
    states = {line.check: (line.state, line.words) for line in report.lines}
    assert states["links"] == ("found", "gloo 1 pair") and states["clocks"][0] == "found"
