"""Elastic training with PyTorch: what comes out is what one undisturbed process computes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import ddl_torch as ddl  # noqa: E402  # needs torch
from ddl_torch import elastic  # noqa: E402

from ddlcore.errors import InvalidArgument  # noqa: E402
from plugins.ddl_torch.tests.elastic_training import STEPS, batch, network, undisturbed  # noqa: E402
from tests.api.elastic.threads import ElasticThreads, Killed  # noqa: E402

ROOT = Path(__file__).parents[3]


def close(state: Any, expected: Any) -> bool:
    pairs = zip(state, expected, strict=True)
    return all(torch.allclose(one.double(), other.double(), rtol=1e-10, atol=1e-12) for one, other in pairs)


def trained(
    deaths: set[tuple[int, int]], steps: int, again: bool = True, rollback: str = "step", every: int = 1
) -> Callable[[int], Any]:
    """Return what a thread does: it trains, and dies at each (place, step) of ``deaths`` once, after backward()."""
    lock = threading.Lock()

    def dies(place: int, step: int) -> bool:
        with lock:
            if (place, step) not in deaths:
                return False
            deaths.remove((place, step))
            return True

    def play(place: int) -> Any:
        with lock:  # torch's random generator is one for all threads
            model = network(seed=1)
        optimizer = ddl.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), named_parameters=model.named_parameters()
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.9)
        state = elastic.TorchState(model, optimizer, scheduler=scheduler, done=0, rollback=rollback)

        @elastic.run
        def train(state: Any) -> tuple[int, int, list[Any]]:
            while state.done < steps if rollback == "commit" else state.steps < steps:
                step = state.done if rollback == "commit" else state.steps
                images, target = batch(step)
                state.optimizer.zero_grad()
                (state.model(images) - target).square().mean().backward()
                if dies(place, step):
                    raise Killed(again)
                state.optimizer.step()
                state.scheduler.step()
                state.done = step + 1
                if state.done % every == 0 or state.done == steps:
                    state.commit()
            return state.done, ddl.size(), [value.clone() for value in state.model.state_dict().values()]

        return train(state)

    return play


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo"])
@pytest.mark.parametrize("rollback", ["step", "commit"])
def test_the_result_is_that_of_an_undisturbed_process(backend: str, rollback: str) -> None:
    results = ElasticThreads(
        3, trained({(1, 7)}, 30, again=False, rollback=rollback, every=1 if rollback == "step" else 4), backend=backend
    ).play()
    expected = undisturbed(30)
    assert sorted(results) == [0, 2]
    for done, size, state in results.values():
        assert (done, size) == (30, 2) and close(state, expected)


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_die_and_come_again(seed: int) -> None:
    """Place 0 lives, so that somebody always has the state; the others die at random steps, and may do so together."""
    chance = random.Random(seed)
    size, steps = 2 + seed % 3, 60
    deaths = {(place, step) for place in range(1, size) for step in range(steps) if chance.random() < 0.05}
    count = len(deaths)
    world = ElasticThreads(size, trained(deaths, steps))
    results = world.play()
    expected = undisturbed(steps)
    done = {place: result for place, result in results.items() if not isinstance(result, SystemExit)}
    assert 0 in done and world.deaths <= count
    for place, result in done.items():
        assert not isinstance(result, BaseException), (place, result)
        assert result[0] == steps and close(result[2], expected), place


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("kill", ["1:40", "0:90"])
def test_a_killed_rank_is_started_again_and_joins(kill: str, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "KILL": kill, "KILL_MARK": str(tmp_path / "killed")}
    command = [sys.executable, "-m", "ddlcore.launch", "run", "-np", "3", "--min-np", "2"]
    program = str(ROOT / "plugins/ddl_torch/tests/programs/elastic.py")
    done = subprocess.run([*command, "python", program], env=environ, capture_output=True, text=True, timeout=200)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    rank, step = kill.split(":")
    assert f"rank {rank} killed by signal 9 (SIGKILL); it is started again" in text
    assert f"begins at {step} of {STEPS} on 2" in text or f"begins at {int(step) + 1} of {STEPS} on 2" in text, text
    results = [line.partition("result ")[2].split() for line in done.stdout.splitlines() if "result " in line]
    assert [tuple(map(int, one[:3])) for one in results] == [(STEPS, STEPS, 3)] * 3, text
    expected = [value.double().sum() for value in undisturbed()]
    for one in results:
        assert close([torch.tensor(float(value), dtype=torch.float64) for value in one[3].split(",")], expected), text


def test_wrong_arguments() -> None:
    def play(place: int) -> None:
        with pytest.raises(InvalidArgument, match="rollback='often' is none of step, commit"):
            elastic.TorchState(network(), rollback="often")
        with pytest.raises(InvalidArgument, match="commit is a name of the state itself"):
            elastic.TorchState(network(), commit=1)

        with pytest.raises(InvalidArgument, match="L-BFGS changes parameters several times"):
            elastic.TorchState(optimizer=torch.optim.LBFGS(network().parameters()))

    assert ElasticThreads(1, play).play() == {0: None}


def test_attributes_and_weights_are_of_the_same_moment() -> None:
    """Where ranks join at check_host_updates(): the joiner gets what the others have, not what they committed."""

    def play(place: int) -> tuple[int, float, int]:
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = ddl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        state = elastic.TorchState(model, optimizer, count=0)

        @elastic.run
        def train(state: Any) -> None:
            if state.steps == 0:
                torch.nn.init.constant_(state.model.weight, 0.0)
            while state.steps < 5 or ddl.size() < 2:
                state.optimizer.zero_grad()
                state.model(torch.ones(1, 1)).sum().backward()
                if place == 1 and state.steps == 2:
                    raise Killed(again=True)
                state.optimizer.step()
                state.count += 1
                if state.steps <= 3:  # the death is within these
                    state.commit()
                else:
                    state.check_host_updates()

        train(state)
        return state.count, float(model.weight.detach()), state.steps

    results = ElasticThreads(2, play).play()
    assert results[0] == results[1]
    count, weight, steps = results[0]
    assert count == steps and weight == -0.5 * steps


class TestSampler:
    """Horovod's interface, and each sample once."""

    def test_the_rest_is_dealt_anew(self) -> None:
        def play(place: int) -> list[int]:
            sampler = elastic.ElasticSampler(range(20), seed=5)
            seen = list(sampler)
            assert len(sampler) == len(seen) == 10
            sampler.record_batch(0, 3)
            assert len(sampler) == 10 and list(sampler) == seen, "these samples stay dealt until the next reset"
            state = sampler.state_dict()
            assert state == {"epoch": 0, "processed_num": 6}
            other = elastic.ElasticSampler(range(20), seed=5)
            other.load_state_dict(state)
            assert len(other) == 7 and list(other) == seen[3:]
            other.set_epoch(1)
            assert (other.epoch, other.processed_num) == (1, 0) and list(other) != seen
            return seen

        results = ElasticThreads(2, play).play()
        assert sorted(results[0] + results[1]) == list(range(20))

    def test_a_first_world_may_be_smaller_than_the_launch(self) -> None:
        """A sampler is made before its rank is in a world. All samples are dealt to the ranks that have come."""

        def play(place: int) -> list[int]:
            if place == 2:
                return []  # it ends before it joins
            state = elastic.TorchState(sampler=elastic.ElasticSampler(range(12), shuffle=False))

            @elastic.run
            def train(state: Any) -> list[int]:
                return list(state.sampler)

            return list(train(state))

        results = ElasticThreads(3, play, least=2).play()
        assert {len(results[0]), len(results[1])} == {6}
        assert sorted(results[0] + results[1]) == list(range(12))

    @pytest.mark.parametrize(("length", "processed", "size"), [(1, 0, 4), (7, 6, 3), (10, 3, 4), (5, 5, 2)])
    def test_padding(self, length: int, processed: int, size: int) -> None:
        """All ranks get equally many, even if fewer samples than ranks are left."""

        def play(place: int) -> tuple[int, list[int]]:
            sampler = elastic.ElasticSampler(range(length), shuffle=False)
            sampler.load_state_dict({"epoch": 0, "processed_num": processed})
            return len(sampler), list(sampler)

        shares = ElasticThreads(size, play).play().values()
        dealt = [one for _, one in shares]
        assert {len(one) for one in dealt} == {each for each, _ in shares}
        assert len({each for each, _ in shares}) == 1
        assert {one for each in dealt for one in each} == set(range(processed, length))

    def test_an_empty_dataset_is_refused(self) -> None:
        def play(place: int) -> None:
            with pytest.raises(InvalidArgument, match="this one has none"):
                elastic.ElasticSampler([])

        assert ElasticThreads(1, play).play() == {0: None}
