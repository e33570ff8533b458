"""What the coordinator gets from a search: trials that count, trials while the tuner thinks, and an end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddlcore.builtin.tuners.grid import GridTuner
from ddlcore.contracts.tuner import Tuner
from ddlcore.tune.driver import FEWEST_STEPS, FIRST_STEPS, SearchDriver, SearchPlan
from ddlcore.tune.session import Phase, Session, TimedSteps
from ddlcore.types import Knob, Value

KNOB = Knob("overlap", choices=("off", "on"))
DEFAULT: dict[str, Value] = {"overlap": "off"}
NBYTES = 1 << 20


class Later:
    """Does what is to be done aside when it is told to."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.works.append(work)

    def do(self) -> None:
        works, self.works = self.works, []
        for work in works:
            work()


class Notes:
    def __init__(self) -> None:
        self.samples: list[TimedSteps] = []
        self.ends: list[str] = []
        self.begun = 0

    def began(self, session: Session, nbytes: int) -> None:
        self.begun += 1

    def sampled(self, session: Session, sample: TimedSteps, nbytes: int) -> None:
        self.samples.append(sample)

    def ended(self, session: Session, why: str) -> None:
        self.ends.append(why)


def plan(make: Callable[[Sequence[Knob]], Tuner] = GridTuner) -> SearchPlan:
    return SearchPlan((KNOB,), DEFAULT, make, trials=3, steps=5, warmup=2)


def run_trial(driver: SearchDriver, ns: int = 100_000_000, nbytes: int = NBYTES) -> str:
    """One trial of two ranks; the setting it ran with."""
    trial = driver.trial(nbytes)
    if trial.periods == 0:
        return "for ever"
    driver.trial_over([[ns] * (trial.periods - 1), [ns // 2] * (trial.periods - 1)])
    return str(trial.values["overlap"])


def test_while_the_tuner_thinks_the_steps_go_on() -> None:
    """Trials of the same settings, which count for nothing, until it has come to something."""
    later = Later()
    driver = SearchDriver(plan(), (), later)
    assert driver.trial(NBYTES).values == DEFAULT
    assert driver.trial(NBYTES).values == DEFAULT  # no session yet
    later.do()
    first = driver.trial(NBYTES)
    assert first.periods == 1 + FIRST_STEPS + 2 + 5
    driver.trial_over([[100_000_000] * (first.periods - 1)] * 2)
    assert [run_trial(driver), run_trial(driver)] == ["off", "off"]
    assert driver.session is not None and not driver.session.samples
    later.do()
    assert len(driver.session.samples) == 1
    assert driver.trial(NBYTES).values == {"overlap": "on"}


def test_the_slowest_rank_of_each_step_decides() -> None:
    """And the steps right after a change do not count."""
    driver = SearchDriver(plan(), (), lambda work: work())
    trial = driver.trial(NBYTES)
    skipped = [900_000_000] * (FIRST_STEPS + 2)
    driver.trial_over([[*skipped, 100, 200, 300, 400, 500], [*skipped, 500, 400, 300, 200, 100]])
    assert trial.periods == len(skipped) + 6
    assert driver.session is not None
    assert [round(s * 1e9) for s in driver.session.samples[0].steps_s] == [500, 400, 300, 400, 500]


def test_short_steps_are_measured_more_often() -> None:
    """A sample lasts 50 ms at least, but not for ever."""
    for ns, steps in ((10_000_000, 5), (1_000_000, 50), (1_000, 100)):
        driver = SearchDriver(plan(), (), lambda work: work())
        run_trial(driver, ns)
        assert driver.trial(NBYTES).periods == 1 + 2 + steps, ns


def test_it_comes_to_an_end_and_says_so_once() -> None:
    """Then one trial for ever, with what was found."""
    notes = Notes()
    driver = SearchDriver(plan(), [notes], lambda work: work())
    ways = []
    for _ in range(60):
        ways.append(run_trial(driver, 50_000_000 if driver._holds["overlap"] == "on" else 100_000_000))
        if ways[-1] == "for ever":
            break
    assert ways[-1] == "for ever"
    assert notes.ends == [""] and notes.begun == 1
    assert driver.session is not None and len(notes.samples) == len(driver.session.samples)
    assert driver.session.phase is Phase.DONE


def test_discarded_trials_are_repeated_and_get_shorter() -> None:
    """A loop that is left now and then is still measured, in shorter stretches."""
    driver = SearchDriver(plan(), (), lambda work: work())
    lengths = []
    for _ in range(6):
        trial = driver.trial(NBYTES)
        lengths.append(trial.periods - FIRST_STEPS - 3)
        driver.trial_discarded()
    assert lengths == [5, 5, FEWEST_STEPS, FEWEST_STEPS, FEWEST_STEPS, FEWEST_STEPS]
    assert driver.session is not None and not driver.session.samples


def test_another_schedule_begins_anew() -> None:
    """What was measured of a step that moved other bytes is not comparable."""
    notes = Notes()
    driver = SearchDriver(plan(), [notes], lambda work: work())
    for _ in range(3):
        run_trial(driver)
    before = driver.session
    run_trial(driver, nbytes=2 * NBYTES)
    assert driver.session is not before and notes.begun == 2


def test_a_schedule_that_comes_again_goes_on_where_it_was() -> None:
    """A script that is run again may begin with another loop, which moves less: the search is not lost by it."""
    notes = Notes()
    driver = SearchDriver(plan(), [notes], lambda work: work())
    run_trial(driver)
    before = driver.session
    assert before is not None
    taken = len(before.samples)
    driver.settle()
    run_trial(driver, nbytes=NBYTES // 2)
    run_trial(driver)
    assert driver.session is before and len(before.samples) == taken + 1
    assert notes.begun == 2


def test_each_run_begins_with_steps_that_do_not_count() -> None:
    """A script that is run again is as cold as it was the first time."""
    driver = SearchDriver(plan(), (), lambda work: work())
    run_trial(driver)
    assert driver.trial(NBYTES).periods == 1 + 2 + 5
    driver.settle()
    assert driver.trial(NBYTES).periods == 1 + FIRST_STEPS + 2 + 5


def test_a_search_that_cannot_begin_is_told_of() -> None:
    """Whoever waits for its end, as `ddl tune` does, hears why there is none."""

    class Broken(GridTuner):
        def __init__(self, knobs: Sequence[Knob], seed: int = 0) -> None:
            raise RuntimeError("no idea")

    notes = Notes()
    driver = SearchDriver(plan(Broken), [notes], lambda work: work())
    assert run_trial(driver) == "off"
    assert run_trial(driver) == "for ever"
    assert notes.ends == ["the tuner failed: RuntimeError: no idea"]


def test_a_tuner_that_fails_ends_the_search_and_nothing_else() -> None:
    """The training goes on with the default."""

    class Broken(GridTuner):
        def ask(self) -> dict[str, Value] | None:
            raise RuntimeError("no idea")

    notes = Notes()
    driver = SearchDriver(plan(Broken), [notes], lambda work: work())
    for _ in range(3):
        run_trial(driver)
    assert driver.trial(NBYTES).periods == 0
    assert driver.trial(NBYTES).values == DEFAULT
    assert notes.ends == ["the tuner failed: RuntimeError: no idea"]
