"""Successions of coordinators keep their promises in every run of their model, and each planted fault is found."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from tests.models.explore import explore, follow, search, walk
from tests.models.succession_model import Succession
from tests.models.succession_state import MUTANTS, Budget, Config
from tests.models.succession_traces import TRACES
from tests.tiers import long

# Few enough states to visit all of them. The launcher runs on host 0.
SMALL = [
    Config((0, 1, 2), Budget(hosts=1)),
    Config((0, 1, 2), Budget(splits=1)),
    Config((0, 1, 2), Budget(hosts=1, deaths=1)),
    Config((0, 1, 2), Budget(restarts=1, deaths=1)),
    Config((0, 1, 2), Budget(dismissals=1, hosts=1)),
    Config((0, 1, 2), Budget(hosts=1, crashes=1)),
    Config((1, 2, 3), Budget(hosts=2)),
    Config((0, 1, 2, 3), Budget(hosts=1)),
    Config((0, 1, 2, 3), Budget(splits=1)),
    Config((0, 1, 2, 3), Budget(hosts=2)),
    Config((0, 0, 1, 1), Budget(splits=1, deaths=1)),
    Config((0, 1, 2, 3, 4), Budget(hosts=1)),
    Config((0, 1), Budget(deaths=1, restarts=1, splits=1)),
]
# These take up to fifteen seconds each.
MEDIUM = [
    Config((0, 1, 2), Budget(splits=1, deaths=1)),
    Config((0, 1, 2), Budget(splits=1, dismissals=1)),
    Config((0, 1, 2), Budget(hosts=1, crashes=1, deaths=1)),
    Config((0, 0, 1, 1), Budget(hosts=1, dismissals=1)),
    Config((0, 0, 1, 2), Budget(hosts=2, deaths=1)),
    Config((0, 1, 2, 3), Budget(hosts=1, deaths=1)),
    Config((0, 1, 2, 3), Budget(hosts=2, deaths=1)),
    Config((0, 1, 2, 3, 4), Budget(hosts=2)),
]
LARGE = [
    Config((0, 1, 2, 3), Budget(deaths=1, hosts=1, splits=1, restarts=1, dismissals=1)),
    Config((0, 1, 2, 3, 4), Budget(deaths=1, hosts=3, restarts=1)),
    Config((0, 0, 1, 1, 2, 3), Budget(deaths=2, hosts=2, splits=1)),
    Config((1, 2, 3), Budget(deaths=1, hosts=2, restarts=1, dismissals=2)),
    Config((0, 1, 2, 3), Budget(deaths=1, hosts=1, crashes=2)),
    Config((1, 2, 3, 4), Budget(deaths=2, hosts=1, splits=1, restarts=1, suspicions=1, hurries=1)),
]
# By mutant: the configuration in which a promise breaks, as a visit to all states shows.
FOUND = {
    "counts what is over": Config((0, 1, 2, 3), Budget(hosts=2)),
    "begins too early": Config((0, 1, 2), Budget(hosts=1, deaths=1)),
    "keeps only the newest": Config((0, 1, 2), Budget(hosts=1, deaths=1)),
    "takes a refusal for a loss": Config((0, 1, 2), Budget(hosts=1, crashes=1)),
    "ends at once": Config((0, 1, 2), Budget(dismissals=1, hosts=1)),
    "trusts the command": Config((0, 1, 2), Budget(splits=1)),
    "no quorum": Config((0, 1, 2), Budget(splits=1)),
    "any state": Config((0, 1), Budget(deaths=1, restarts=1, splits=1)),
    "any first": Config((0, 1, 2, 3), Budget(splits=1)),
}
# The same, as random runs show it: a visit to all states would take longer.
MET = {"forgets the dead": Config((0, 1, 2, 3), Budget(deaths=1, hosts=1))}


@pytest.mark.parametrize("config", [*SMALL, *long(*MEDIUM)], ids=str)
def test_every_state_of_small_jobs(config: Config) -> None:
    result = explore(Succession(config))
    print(f"{config}: {result}")
    assert result.is_complete and not result.violation, str(result)


@pytest.mark.parametrize(
    ("config", "runs"), [*((one, 100) for one in LARGE), *long(*((one, 1000) for one in LARGE))], ids=str
)
def test_random_runs_of_larger_jobs(config: Config, runs: int) -> None:
    result = walk(Succession(config), runs, seed=20)
    assert result.ends >= runs and not result.violation, str(result)


def test_every_mutant_is_looked_for() -> None:
    assert sorted(MUTANTS) == sorted([*FOUND, *MET, *TRACES])


@pytest.mark.parametrize("mutant", FOUND)
def test_a_planted_fault_is_found(mutant: str) -> None:
    """A model that does not find planted faults proves nothing. SMALL has the same configurations without the fault."""
    assert FOUND[mutant] in SMALL
    result = explore(Succession(replace(FOUND[mutant], mutant=mutant)))
    print(f"{mutant}: {result}")
    assert result.violation


@pytest.mark.parametrize("mutant", MET)
def test_a_planted_fault_is_met_by_chance(mutant: str) -> None:
    assert MET[mutant] in MEDIUM
    assert walk(Succession(replace(MET[mutant], mutant=mutant)), 300, seed=20).violation


@pytest.mark.parametrize("mutant", TRACES)
def test_a_planted_fault_that_is_seldom_found(mutant: str) -> None:
    """The run breaks a promise with the fault in the model; without it, the run is not possible."""
    config, names = TRACES[mutant]
    assert follow(Succession(replace(config, mutant=mutant)), names)
    with pytest.raises(KeyError):
        follow(Succession(config), names)


# Random runs need hundreds of attempts.
@pytest.mark.parametrize("mutant", long("counts the dismissed", "takes the dismissed for dead"))
def test_random_runs_find_in_the_end_what_is_seldom_found(mutant: str) -> None:
    config, _ = TRACES[mutant]
    assert walk(Succession(replace(config, mutant=mutant)), 3000, seed=20).violation


def test_a_successor_that_counts_what_is_over_ends_a_job() -> None:
    """Agents come one after the other, and the ranks of the first one tell that a world has begun. Older ones are over then.

    The successor must not count them again when a later agent tells of them.
    """
    config = Config((0, 1, 2, 3), Budget(hosts=2))
    before = explore(Succession(replace(config, mutant="counts what is over")))
    after = explore(Succession(config))
    print(f"with what is over: {before}\nwithout it: {after}")
    assert "ends the job, though its part could go on" in before.violation, str(before)
    assert after.is_complete and not after.violation and after.states > before.states, str(after)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("config", LARGE, ids=str)
def test_many_runs_and_states(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how much was seen. SOAK_RUNS (10,000) random runs of a large configuration, and 2 minutes of its states."""
    runs, begun_s = int(os.environ.get("SOAK_RUNS", "10000")), time.monotonic()
    for result in search(Succession(config), runs):
        with capsys.disabled():
            print(f"\n{config}: {result}; {time.monotonic() - begun_s:.0f} s", end="")
        assert not result.violation, str(result)
