"""What the coordinator gets from a search: legs that count, legs while the tuner thinks, and an end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddlcore.builtin.tuners.grid import GridTuner
from ddlcore.contracts.tuner import Tuner
from ddlcore.tune.pilot import FEWEST_STEPS, FIRST_STEPS, Pilot, Plan
from ddlcore.tune.session import Phase, Sample, Session
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
        self.samples: list[Sample] = []
        self.ends: list[str] = []
        self.begun = 0

    def began(self, session: Session, nbytes: int) -> None:
        self.begun += 1

    def sampled(self, session: Session, sample: Sample, nbytes: int) -> None:
        self.samples.append(sample)

    def ended(self, session: Session, why: str) -> None:
        self.ends.append(why)


def plan(make: Callable[[Sequence[Knob]], Tuner] = GridTuner) -> Plan:
    return Plan((KNOB,), DEFAULT, make, trials=3, steps=5, warmup=2)


def fly(pilot: Pilot, ns: int = 100_000_000, nbytes: int = NBYTES) -> str:
    """One leg of two ranks; how it was flown."""
    leg = pilot.leg(nbytes)
    if leg.periods == 0:
        return "for ever"
    pilot.flown([[ns] * (leg.periods - 1), [ns // 2] * (leg.periods - 1)])
    return str(leg.values["overlap"])


def test_while_the_tuner_thinks_the_steps_go_on() -> None:
    """Legs of the same settings, which count for nothing, until it has come to something."""
    later = Later()
    pilot = Pilot(plan(), (), later)
    assert pilot.leg(NBYTES).values == DEFAULT
    assert pilot.leg(NBYTES).values == DEFAULT  # no session yet
    later.do()
    first = pilot.leg(NBYTES)
    assert first.periods == 1 + FIRST_STEPS + 2 + 5
    pilot.flown([[100_000_000] * (first.periods - 1)] * 2)
    assert [fly(pilot), fly(pilot)] == ["off", "off"]
    assert pilot.session is not None and not pilot.session.samples
    later.do()
    assert len(pilot.session.samples) == 1
    assert pilot.leg(NBYTES).values == {"overlap": "on"}


def test_the_slowest_rank_of_each_step_decides() -> None:
    """And the steps right after a change do not count."""
    pilot = Pilot(plan(), (), lambda work: work())
    leg = pilot.leg(NBYTES)
    skipped = [900_000_000] * (FIRST_STEPS + 2)
    pilot.flown([[*skipped, 100, 200, 300, 400, 500], [*skipped, 500, 400, 300, 200, 100]])
    assert leg.periods == len(skipped) + 6
    assert pilot.session is not None
    assert [round(s * 1e9) for s in pilot.session.samples[0].steps_s] == [500, 400, 300, 400, 500]


def test_short_steps_are_measured_more_often() -> None:
    """A sample lasts 50 ms at least, but not for ever."""
    for ns, steps in ((10_000_000, 5), (1_000_000, 50), (1_000, 100)):
        pilot = Pilot(plan(), (), lambda work: work())
        fly(pilot, ns)
        assert pilot.leg(NBYTES).periods == 1 + 2 + steps, ns


def test_it_comes_to_an_end_and_says_so_once() -> None:
    """Then one leg for ever, with what was found."""
    notes = Notes()
    pilot = Pilot(plan(), [notes], lambda work: work())
    ways = []
    for _ in range(60):
        ways.append(fly(pilot, 50_000_000 if pilot._holds["overlap"] == "on" else 100_000_000))
        if ways[-1] == "for ever":
            break
    assert ways[-1] == "for ever"
    assert notes.ends == [""] and notes.begun == 1
    assert pilot.session is not None and len(notes.samples) == len(pilot.session.samples)
    assert pilot.session.phase is Phase.DONE


def test_spoiled_legs_are_flown_again_and_get_shorter() -> None:
    """A loop that is left now and then is still measured, in shorter stretches."""
    pilot = Pilot(plan(), (), lambda work: work())
    lengths = []
    for _ in range(6):
        leg = pilot.leg(NBYTES)
        lengths.append(leg.periods - FIRST_STEPS - 3)
        pilot.spoiled()
    assert lengths == [5, 5, FEWEST_STEPS, FEWEST_STEPS, FEWEST_STEPS, FEWEST_STEPS]
    assert pilot.session is not None and not pilot.session.samples


def test_another_schedule_begins_anew() -> None:
    """What was measured of a step that moved other bytes is not comparable."""
    notes = Notes()
    pilot = Pilot(plan(), [notes], lambda work: work())
    for _ in range(3):
        fly(pilot)
    before = pilot.session
    fly(pilot, nbytes=2 * NBYTES)
    assert pilot.session is not before and notes.begun == 2


def test_a_schedule_that_comes_again_goes_on_where_it_was() -> None:
    """A script that is run again may begin with another loop, which moves less: the search is not lost by it."""
    notes = Notes()
    pilot = Pilot(plan(), [notes], lambda work: work())
    fly(pilot)
    before = pilot.session
    assert before is not None
    taken = len(before.samples)
    pilot.settle()
    fly(pilot, nbytes=NBYTES // 2)
    fly(pilot)
    assert pilot.session is before and len(before.samples) == taken + 1
    assert notes.begun == 2


def test_each_run_begins_with_steps_that_do_not_count() -> None:
    """A script that is run again is as cold as it was the first time."""
    pilot = Pilot(plan(), (), lambda work: work())
    fly(pilot)
    assert pilot.leg(NBYTES).periods == 1 + 2 + 5
    pilot.settle()
    assert pilot.leg(NBYTES).periods == 1 + FIRST_STEPS + 2 + 5


def test_a_search_that_cannot_begin_is_told_of() -> None:
    """Whoever waits for its end, as `ddl tune` does, hears why there is none."""

    class Broken(GridTuner):
        def __init__(self, knobs: Sequence[Knob], seed: int = 0) -> None:
            raise RuntimeError("no idea")

    notes = Notes()
    pilot = Pilot(plan(Broken), [notes], lambda work: work())
    assert fly(pilot) == "off"
    assert fly(pilot) == "for ever"
    assert notes.ends == ["the tuner failed: RuntimeError: no idea"]


def test_a_tuner_that_fails_ends_the_search_and_nothing_else() -> None:
    """The training goes on with the default."""

    class Broken(GridTuner):
        def ask(self) -> dict[str, Value] | None:
            raise RuntimeError("no idea")

    notes = Notes()
    pilot = Pilot(plan(Broken), [notes], lambda work: work())
    for _ in range(3):
        fly(pilot)
    assert pilot.leg(NBYTES).periods == 0
    assert pilot.leg(NBYTES).values == DEFAULT
    assert notes.ends == ["the tuner failed: RuntimeError: no idea"]
