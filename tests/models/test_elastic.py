"""The protocol of elastic worlds keeps its promises in every run of its model, and each planted fault is found."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace

import pytest

from tests.models.elastic_model import Elastic
from tests.models.elastic_state import MUTANTS, Budget, Config
from tests.models.elastic_traces import FINE, TRACES
from tests.models.explore import explore, follow, search, walk
from tests.tiers import long

# Few enough states to visit all of them.
SMALL = [
    Config(2, 2, 0, Budget(deaths=1)),
    Config(2, 1, 1),
    Config(3, 1, 0, Budget(hosts=1)),
]
LARGE = [
    Config(3, 2, 1, Budget(deaths=2)),
    Config(3, 2, 1, Budget(deaths=1, hosts=1, suspicions=1)),
    Config(4, 2, 1, Budget(deaths=1, hosts=1, splits=1, suspicions=1)),
    Config(3, 2, 2, Budget(deaths=2, hosts=1, suspicions=1)),
    Config(3, 2, 2, Budget(deaths=1, splits=1, suspicions=1)),
    Config(2, 3, 2, Budget(deaths=1, hosts=1, splits=1, suspicions=1)),
]


@pytest.mark.parametrize("config", SMALL, ids=str)
def test_every_state_of_small_worlds(config: Config) -> None:
    result = explore(Elastic(config))
    assert result.is_complete and not result.violation, str(result)


@pytest.mark.parametrize("config", [*LARGE[1:], *long(LARGE[0])], ids=str)
def test_random_runs_of_larger_worlds(config: Config) -> None:
    result = walk(Elastic(config), 150, seed=20)
    assert result.ends >= 150 and not result.violation, str(result)


@pytest.mark.parametrize(
    "mutant", [*(one for one in MUTANTS if one not in TRACES and one != "forgets accepted"), *long("forgets accepted")]
)
def test_a_planted_fault_is_found(mutant: str) -> None:
    """A model that finds none of these would prove nothing."""
    found = (walk(Elastic(replace(config, mutant=mutant)), 300, seed=20) for config in LARGE)
    assert any(result.violation for result in found)


@pytest.mark.parametrize("mutant", TRACES)
def test_a_planted_fault_that_random_runs_seldom_find(mutant: str) -> None:
    """The run breaks a promise with the fault in the model; without it, the run is not possible or keeps all promises."""
    config, names = TRACES[mutant]
    assert follow(Elastic(replace(config, mutant=mutant)), names)
    with contextlib.suppress(KeyError):
        assert not follow(Elastic(config), names)


@pytest.mark.parametrize(("config", "names"), FINE, ids=("seen late", "told by the lost"))
def test_a_run_that_only_looks_broken(config: Config, names: list[str]) -> None:
    assert not follow(Elastic(config), names)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("config", LARGE, ids=str)
def test_many_runs_and_states(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how much was seen. SOAK_RUNS (10,000) random runs of a large configuration, and 2 minutes of its states."""
    runs, begun_s = int(os.environ.get("SOAK_RUNS", "10000")), time.monotonic()
    for result in search(Elastic(config), runs):
        with capsys.disabled():
            print(f"\n{config}: {result}; {time.monotonic() - begun_s:.0f} s", end="")
        assert not result.violation, str(result)
