"""What observes a job: what it is told and in which order, and that it cannot harm the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ddlcore.config.loading import Settings, load_settings
from ddlcore.config.setting import Setting
from ddlcore.config.table import SETTINGS
from ddlcore.hooks import WatchProvider
from ddlcore.launch.job.watch import RunningRanks, Watch, WatchedJob, Watches, check_watches, draws, watching
from ddlcore.launch.output.screen import Screen
from ddlcore.launch.ranks.exit_status import End, NotStarted
from ddlcore.messages.observing import Observation
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import Bye, ToCoordinator
from ddlcore.messages.to_rank import Outgoing
from ddlcore.plug.registry import Distribution, Registry
from ddlcore.types import Value

RUNNING = RunningRanks(lambda: None, lambda rank: "here", lambda: "")
WATCHED = Setting("watched", str, "", "what is asked of the watch")
PULSE_S = Setting("pulse_s", float, 0.0, "how often each rank reports")
ACTIVITY = Setting("activity", bool, False, "whether it says what it waits for")
OWN = (WATCHED, PULSE_S, ACTIVITY)
told: list[str] = []  # of the watches that the registry builds


class Noting(Watch):
    """Notes what it is told in ``told``."""

    def __init__(self, job: WatchedJob) -> None:
        if job.settings.text("watched") == "nowhere":
            raise ValueError("--watched nowhere: there is no such place")
        if job.settings.text("watched") == "unwritable":
            raise FileNotFoundError(2, "No such file or directory", "/there")
        if job.settings.text("watched") == "broken":
            raise KeyError("a fault of the plugin")
        told.append(f"built for {job.title} on {job.hosts}")
        told.append(f"activity {job.settings['activity']}, pulses every {job.settings['pulse_s']} s")

    @classmethod
    def check(cls, settings: Settings) -> None:
        if settings.text("watched") == "wrong":
            raise ValueError("--watched wrong: that is no place")

    def screens(self, screens: tuple[Screen, Screen]) -> tuple[Screen, Screen]:
        told.append("screens")
        return screens[1], screens[0]

    def open(self, say: Callable[[str], None]) -> str:
        told.append("open")
        say("it says")
        return "at a place"

    def begin(self, ranks: RunningRanks) -> None:
        told.append(f"begin on {ranks.host_of(0)}")

    def heard(self, rank: int, message: Observation) -> None:
        told.append(f"heard {rank}")

    def passed(self, rank: int, message: ToCoordinator, outgoing: Outgoing[LaunchedRank]) -> None:
        told.append(f"passed {rank} {type(message).__name__} {outgoing}")

    def rank_ended(self, end: End) -> None:
        told.append(f"ended {end.rank}")

    def said(self, text: str) -> None:
        told.append(f"said {text}")

    def finished(self, say: Callable[[str], None]) -> None:
        say("it has ended")

    def drained(self) -> None:
        told.append("drained")

    def over(self, code: int, text: str = "") -> None:
        told.append(f"over {code} {text}")

    def close(self) -> None:
        told.append("closed")


class Broken(Noting):
    """Raises when it hears a rank."""

    def heard(self, rank: int, message: Observation) -> None:
        raise ZeroDivisionError("a fault of the plugin")


class Late(Noting):
    """A watch that raises an error when all ranks have ended, and that wants the parts of a timeline in a directory."""

    timeline_dir = Path("/parts")

    def finished(self, say: Callable[[str], None]) -> None:
        raise ZeroDivisionError("a fault of the plugin")


NO_WATCH = 3


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    told.clear()


def job_of(watched: str, **flags: object) -> WatchedJob:
    settings = load_settings({}, None, {"watched": watched, **flags}, [*SETTINGS, *OWN])
    return WatchedJob(settings, "python train.py", ("node1", "node2"))


ASKS: tuple[tuple[str, Value], ...] = (("activity", True), ("pulse_s", 1.0))


def registry_with(target: str = "Noting", asks: tuple[tuple[str, Value], ...] = ASKS, draws: bool = False) -> Registry:
    registry = Registry()
    provider = WatchProvider("noting", f"{__name__}:{target}", settings=OWN, setting="watched", asks=asks, draws=draws)
    registry.offer(provider, Distribution("ddl-noting", "1.0"))
    assert registry.problems == []
    return registry


def screen() -> Screen:
    return Screen(lambda data: None)


def test_a_watch_is_told_everything() -> None:
    """From before the ranks start until after the end; what it says is shown; pulses are asked for."""
    said: list[str] = []
    with watching(job_of("here"), registry_with()) as watches:
        first, second = screen(), screen()
        assert watches.screens((first, second)) == (second, first)
        watches.open(said.append, lambda line: said.append(f"shown: {line}"))
        watches.begin(RUNNING)
        watches.heard(1, Observation("mine", b""))
        watches.passed(0, Bye("done"), [])
        watches.rank_ended(End(1, 0, 0.0))
        watches.said("a line")
        watches.finished(said.append)
        watches.drained()
        watches.over(0)
    assert said == ["it says", "shown: at a place", "it has ended"]
    assert told == [
        "built for python train.py on ('node1', 'node2')",
        "activity True, pulses every 1.0 s",
        "screens",
        "open",
        "begin on here",
        "heard 1",
        "passed 0 Bye []",
        "ended 1",
        "said a line",
        "drained",
        "over 0 ",
        "closed",
    ]


@pytest.mark.parametrize(
    ("watched", "flags", "asks", "pulse_s", "ranks"),
    [
        ("here", {}, ASKS, 1.0, {"activity": "flag", "pulse_s": "flag"}),
        ("here", {"pulse_s": 0.25}, ASKS, 0.25, {"activity": "flag", "pulse_s": "flag"}),
        ("here", {}, ASKS[1:], 1.0, {"activity": "default", "pulse_s": "flag"}),
        ("here", {}, (), 0.0, {"activity": "default", "pulse_s": "default"}),
        ("", {}, ASKS, 0.0, {"activity": "default", "pulse_s": "default"}),
    ],
)
def test_the_ranks_report_what_a_watch_needs(
    watched: str,
    flags: dict[str, object],
    asks: tuple[tuple[str, Value], ...],
    pulse_s: float,
    ranks: dict[str, str],
) -> None:
    """Only for a watch that needs it and is asked for; a user's own interval is kept."""
    with watching(job_of(watched, **flags), registry_with(asks=asks)) as watches:
        assert watches.settings["pulse_s"] == pulse_s
        assert {name: watches.settings.source(name) for name in ranks} == ranks
    assert ("closed" in told) == bool(watched)


def test_a_watch_that_raises_in_the_end_is_named() -> None:
    """The error is shown by the function that ``finished`` gets. The function that ``open`` got shows nothing any more."""
    job, before, said = job_of("here"), list[str](), list[str]()
    watches = Watches(job.settings, [Late(job), Noting(job)])
    watches.open(before.append, lambda line: None)
    before.clear()
    watches.finished(said.append)
    assert before == [] and len(said) == 2
    assert said[0].startswith("Late has failed, the job goes on: ZeroDivisionError") and said[1] == "it has ended"


def test_the_directory_of_a_timeline_is_that_of_the_watch_that_wants_one() -> None:
    job = job_of("here")
    assert Watches(job.settings, [Noting(job)]).timeline_dir is None
    assert Watches(job.settings, [Noting(job), Late(job)]).timeline_dir == Path("/parts")


def test_a_watch_that_raises_does_not_end_the_job() -> None:
    """It gets no more events, the user is told once, the others go on, and it is closed."""
    job = job_of("here")
    broken, sound, said = Broken(job), Noting(job), list[str]()
    told.clear()
    watches = Watches(job.settings, [broken, sound])
    watches.open(said.append, lambda line: None)
    said.clear()
    for rank in (0, 1):
        watches.heard(rank, Observation("mine", b""))
    watches.close()
    assert told == ["open", "open", "heard 0", "heard 1", "closed", "closed"]
    assert said == ["Broken has failed, the job goes on: ZeroDivisionError: a fault of the plugin"]


def test_an_exception_is_the_end_of_the_job() -> None:
    with pytest.raises(NotStarted), watching(job_of("here"), registry_with()):
        raise NotStarted("no host can be reached")
    assert told[-2:] == ["over -1 NotStarted: no host can be reached", "closed"]


@pytest.mark.parametrize(
    ("watched", "target", "words"),
    [
        ("nowhere", "Noting", "--watched nowhere: there is no such place"),
        ("wrong", "Noting", "--watched wrong: that is no place"),
        ("broken", "Noting", "a watch cannot be built: KeyError"),
        ("unwritable", "Noting", "the watch 'noting' (watched=unwritable): [Errno 2] No such file or directory"),
        ("here", "NO_WATCH", "watch 'noting' of ddl-noting 1.0: tests.launch.test_watch:NO_WATCH is no Watch"),
        ("here", "Missing", "watch 'noting' of ddl-noting 1.0: tests.launch.test_watch:Missing cannot be loaded"),
    ],
)
def test_a_watch_that_cannot_be_built(watched: str, target: str, words: str) -> None:
    """The job is not started, and one line says why."""
    with pytest.raises(NotStarted) as caught, watching(job_of(watched), registry_with(target)):
        pass
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"), [("sample_ms", "install it: pip install"), ("sampled", "no installed plugin has it")]
)
def test_a_watch_that_needs_what_nobody_has(name: str, words: str) -> None:
    with pytest.raises(NotStarted) as caught, watching(job_of("here"), registry_with(asks=((name, 1.0),))):
        pass
    assert f"the watch 'noting' needs the setting {name}; {words}" in str(caught.value)
    assert told == []


def test_only_one_draws() -> None:
    """A progress line is left out while a watch draws on the terminal."""
    assert draws(job_of("here").settings, registry_with(draws=True))
    assert not draws(job_of("here").settings, registry_with())
    assert not draws(job_of("").settings, registry_with(draws=True))


def test_what_is_checked_before_anything_is_started() -> None:
    check_watches(job_of("").settings, registry_with("Missing"))  # nobody asks for it
    check_watches(job_of("here").settings, registry_with())
    with pytest.raises(ValueError, match="--watched wrong: that is no place"):
        check_watches(job_of("wrong").settings, registry_with())
    assert told == []
