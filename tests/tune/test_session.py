"""The course of a search: what is tried, what is believed, and what is written in the end."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from ddlcore.builtin.tuners.grid import GridTuner
from ddlcore.contracts.tuner import Tuner
from ddlcore.tune.gain import gain_of
from ddlcore.tune.session import PAIRS, Phase, Session
from ddlcore.tune.space import CORE, choose, narrowed
from ddlcore.types import Knob, Value
from tests.tiers import long

DEFAULT: dict[str, Value] = {"fusion_bytes": 8 << 20, "first_bucket_bytes": 1 << 20, "overlap": "off"}
LEAST_S = 0.010
SEEDS = range(5)


def grid(knobs: Sequence[Knob], seed: int) -> Tuner:
    return GridTuner(knobs, seed)


def bayes(knobs: Sequence[Knob], seed: int) -> Tuner:
    pytest.importorskip("skopt", reason="pip install 'ddlcore[tune]': the tuner bayes needs scikit-optimize")
    from ddlcore.builtin.tuners.bayes import BayesTuner

    return BayesTuner(knobs, seed)


def planted(values: Mapping[str, Value]) -> float:
    """Seconds of a step; least at 3 MiB, 400 KiB, overlap."""
    fusion, first = values["fusion_bytes"], values["first_bucket_bytes"]
    assert isinstance(fusion, int) and isinstance(first, int)
    cost = LEAST_S * (1 + 0.08 * math.log2(fusion / (3 << 20)) ** 2)
    cost *= 1 + 0.03 * math.log2(first / (400 << 10)) ** 2
    return cost if values["overlap"] == "on" else 1.3 * cost


def search(
    session: Session, cost: Callable[[Mapping[str, Value]], float], seed: int = 0, noise: float = 0.0
) -> Session:
    rng = random.Random(seed)
    while session.phase is not Phase.DONE:
        expected = cost(session.next())
        session.measured([expected * math.exp(rng.gauss(0, noise)) for _ in range(10)])
    return session


@pytest.mark.parametrize("tuner", [grid, bayes])
@pytest.mark.parametrize("seed", [SEEDS[0], *long(*SEEDS[1:])])
def test_the_planted_optimum_is_found(tuner: Callable[[Sequence[Knob], int], Tuner], seed: int) -> None:
    """Within 5 % of it in 20 trials, though steps vary by 3 %."""
    session = search(Session(CORE, DEFAULT, lambda knobs: tuner(knobs, seed), 20), planted, seed, noise=0.03)
    assert len([sample for sample in session.samples if sample.phase is Phase.SEARCH]) <= 22
    assert session.result is not None
    assert planted(session.result) <= 1.05 * LEAST_S


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_flat_cost_changes_nothing(seed: int, noise: float) -> None:
    """However the noise falls, the default is written."""
    session = search(Session(CORE, DEFAULT, lambda knobs: grid(knobs, seed), 20), lambda _: LEAST_S, seed, noise)
    assert session.result == DEFAULT


def test_a_change_that_does_not_pay_by_itself_is_left_out() -> None:
    """Only overlap matters: sizes that the search happened to like stay as they are."""
    session = search(
        Session(CORE, DEFAULT, lambda knobs: grid(knobs, 1), 15),
        lambda values: LEAST_S * (1.0 if values["overlap"] == "on" else 1.2),
        noise=0.002,
    )
    assert session.result == {**DEFAULT, "overlap": "on"}
    final = session.final
    assert final is not None and final.gain.sure
    assert (final.before, final.after) == (DEFAULT, session.result)


def test_two_changes_of_which_either_suffices() -> None:
    """One of them is kept, not none."""

    def cost(values: Mapping[str, Value]) -> float:
        small = isinstance(values["fusion_bytes"], int) and values["fusion_bytes"] < 4 << 20
        return LEAST_S * (1.0 if small or values["overlap"] == "on" else 1.3)

    class Both(GridTuner):
        def ask(self) -> dict[str, Value] | None:
            return {"fusion_bytes": 1 << 20, "first_bucket_bytes": 1 << 20, "overlap": "on"}

    session = search(Session(CORE, DEFAULT, Both, 5), cost, noise=0.001)
    assert session.result is not None
    assert len(session.changed(session.result)) == 1
    assert cost(session.result) == LEAST_S


def test_pairs_alternate() -> None:
    """Before, after, after, before: neither profits from a machine that gets slower."""
    session = search(
        Session(CORE, DEFAULT, lambda knobs: grid(knobs, 1), 12), lambda v: 0.01 if v["overlap"] == "on" else 0.02
    )
    compared = [sample.values for sample in session.samples if sample.phase is Phase.COMPARE]
    sides = ["before" if values == DEFAULT else "after" for values in compared]
    assert sides == ["before", "after", "after", "before"] * (PAIRS // 2)


def test_a_machine_that_gets_slower_fools_nobody() -> None:
    """Each sample takes 1 % longer than the one before: no gain is found where there is none."""
    session = Session(CORE, DEFAULT, lambda knobs: grid(knobs, 1), 10)
    cost = LEAST_S
    while session.phase is not Phase.DONE:
        cost *= 1.01
        session.measured([cost] * 5)
    assert session.result == DEFAULT


def test_a_lucky_default_is_looked_at_again() -> None:
    """The search does not end with its first sample because that was too fast to be true."""
    knob = Knob("overlap", choices=("off", "on"))
    session = Session((knob,), {"overlap": "off"}, GridTuner, 4)
    session.measured([0.0079])
    while session.phase is not Phase.DONE:
        taken = len(session.samples)
        session.measured([(0.008 if session.next()["overlap"] == "on" else 0.010) * (1 + 0.001 * (taken % 3))])
    assert session.result == {"overlap": "on"}


def test_a_warm_start_is_tried_right_after_the_default() -> None:
    """What it lacks stays as it is; what lies outside a knob is not taken."""
    warm: list[Mapping[str, Value]] = [{"overlap": "on", "unknown": 3}, {"fusion_bytes": 1, "overlap": "on"}]
    session = Session(CORE, DEFAULT, lambda knobs: grid(knobs, 1), 6, warm)
    tried = []
    for _ in range(3):
        tried.append(session.next())
        session.measured([LEAST_S])
    assert tried[:2] == [DEFAULT, {**DEFAULT, "overlap": "on"}]
    assert tried[2] not in tried[:2]  # the second of them is the same as the first


def test_what_is_lacking_is_said() -> None:
    """In the search, in a comparison, and nothing at the end."""
    session = Session(CORE[2:], DEFAULT, lambda knobs: grid(knobs, 1), 5)
    assert session.lacks() == "5 of 5 trials, and the comparison with the default"
    while session.phase is Phase.SEARCH:
        session.measured([0.01 if session.next()["overlap"] == "on" else 0.02])
    session.measured([0.02])
    assert session.lacks() == "the comparison of the best with the default (1 of 12 samples)"
    assert search(session, lambda v: 0.01 if v["overlap"] == "on" else 0.02).lacks() == ""


def test_how_sure_a_gain_is() -> None:
    """Equal pairs are no gain; a steady one is sure, a shaky one is not; its bound lies below its mean."""
    assert not gain_of([1.0] * 6, [1.0] * 6).sure
    steady = gain_of([1.0, 1.01, 0.99, 1.0], [0.9, 0.91, 0.89, 0.9])
    assert steady.sure and 0.05 < steady.lower < steady.mean < 0.11
    assert not gain_of([1.0, 2.0, 1.0, 2.0], [0.9, 1.2, 1.5, 1.7]).sure
    with pytest.raises(ValueError, match="at least two"):
        gain_of([1.0], [0.9])


def test_false_alarms_are_rare() -> None:
    """Of 2000 comparisons of a way with itself, about one in a hundred looks like a gain."""
    rng = random.Random(11)
    alarms = sum(
        gain_of([math.exp(rng.gauss(0, 0.05)) for _ in range(PAIRS)], [math.exp(rng.gauss(0, 0.05)) for _ in range(PAIRS)]).sure
        for _ in range(2000)
    )  # fmt: skip
    assert 5 <= alarms <= 40


def test_what_is_searched() -> None:
    """Not what the user has fixed; no buckets that are larger than a step; a default of its own kind is a choice."""
    assert [knob.name for knob in choose(CORE, ["overlap", "backend"])] == ["fusion_bytes", "first_bucket_bytes"]
    fusion, first, overlap = narrowed(CORE, 1 << 20, {**DEFAULT, "overlap": "sometimes"})
    assert (fusion.low, fusion.high) == (16 << 10, 1 << 20)
    assert first.high == 1 << 20
    assert overlap.choices == ("sometimes", "off", "on")
