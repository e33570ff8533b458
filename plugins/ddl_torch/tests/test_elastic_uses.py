"""Elastic training with more of PyTorch: a rank is killed and comes back, and the result is that of one process."""

from __future__ import annotations

import os
import random
import re
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

from ddlcore.errors import DdlInternalError  # noqa: E402
from plugins.ddl_torch.tests import elastic_uses as uses  # noqa: E402
from tests.api.elastic.threads import ElasticThreads, Killed  # noqa: E402
from tests.faults.chaos import chaos, plan  # noqa: E402
from tests.faults.chaos_of_hosts import HostChaos, NewCluster, stormy  # noqa: E402

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "plugins/ddl_torch/tests/programs/elastic_uses.py"
pytestmark = [pytest.mark.processes]


def expected(use: str, steps: int = uses.STEPS) -> dict[str, Any]:
    """Return what one process computes, on the batches that ElasticSampler(seed=4) deals to it."""
    batches = []
    for epoch in range(steps * uses.GLOBAL_BATCH // uses.SAMPLES):
        order = list(range(uses.SAMPLES))
        random.Random(4 + epoch).shuffle(order)
        batches += list(torch.tensor(order).split(uses.GLOBAL_BATCH))
    return uses.undisturbed(use, batches)


@pytest.mark.long
@pytest.mark.parametrize("use", uses.USES)
def test_a_killed_rank_changes_nothing(use: str, tmp_path: Path) -> None:
    """Weights in float64 agree to 1e-10, and each sample is used once an epoch.

    With autocast they agree to 5 % of what was learnt: two ranks round the sums of their own rows to bfloat16.

    A learning rate scheduler and a GradScaler, which is enabled for one of the uses, are parts of the state in all.
    """
    (tmp_path / "enough").touch()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {"USE": use, "FOLDER": str(tmp_path), "STEPS": str(uses.STEPS), "PAUSE_S": "0", "KILL": "1:17", "RANKS": "2"}
    more["PATIENCE_S"] = "170"  # for the new process, which loads PyTorch beside other tests
    command = [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2", "--min-np", "1", sys.executable, str(PROGRAM)]
    environ = {**os.environ, "PYTHONPATH": path, **more}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert len(re.findall(f"result {uses.STEPS} on 2", text)) == 2, text
    assert re.search(r"begins at 17 on 1", text), text
    assert "Exception ignored" not in text, text  # as of a hook that runs in the workers of a DataLoader
    wanted = expected(use)
    lower = use in ("autocast", "scaler")
    for rank in range(2):
        result = torch.load(tmp_path / f"result{rank}")
        scale = result.pop("scale")
        if (
            use == "scaler"
        ):  # halved once; doubled after the first 7 steps, and 7 times in the 49 steps after the infinity
            assert scale == 1024.0 * 2**7
        epochs = uses.STEPS * uses.GLOBAL_BATCH // uses.SAMPLES
        counts = result["uses.weight"].flatten()
        # Of the step whose gradients were infinite, nothing is applied: its twelve samples miss one use.
        skipped = uses.GLOBAL_BATCH if use == "scaler" else 0
        assert counts.sum() == epochs * uses.SAMPLES - skipped, (text, counts)
        assert set(counts.tolist()) <= {epochs, epochs - bool(skipped)}, (text, counts)
        assert result.keys() == wanted.keys()
        begun = uses.model_of(use).state_dict()
        for name, value in wanted.items():
            error, trained = (result[name] - value).abs().max(), (begun[name] - value).abs().max()
            assert error <= (0.05 * trained if lower else 1e-10), (name, error, trained, text)


def test_a_failure_between_unscale_and_step() -> None:
    """The step is computed again with a scaler that has forgotten the void one: gradients are unscaled once."""

    def play(place: int) -> tuple[float, float]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = ddl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        state = elastic.TorchState(model, optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
        failed: list[int] = []

        @elastic.run
        def train(state: Any) -> None:
            while state.steps < 4:
                state.optimizer.zero_grad()
                state.scaler.scale(state.model(torch.ones(1, 1)).sum()).backward()
                if state.steps != 3:  # at step 3 it is step() that unscales
                    state.scaler.unscale_(state.optimizer)
                if state.steps in (2, 3) and state.steps not in failed:
                    failed.append(state.steps)
                    raise DdlInternalError("computes the step again")
                state.scaler.step(state.optimizer)
                state.scaler.update()
                state.commit()

        train(state)
        return float(model.weight.detach()), float(state.scaler.get_scale())

    assert ElasticThreads(2, play).play() == {0: (-4.0, 8.0), 1: (-4.0, 8.0)}


def trained(
    use: str, steps: int, fails: Callable[[int, int], BaseException | None], workers: int = 0
) -> Callable[[int], dict[str, Any]]:
    """Return what a thread at a place of an elastic job does: it trains as programs/elastic_uses.py does.

    If ``fails(place, step)`` returns an error, the thread raises it between the forward and the backward pass of this
    step. With ``workers`` the batches come from that many processes.
    """
    lock = threading.Lock()

    def play(place: int) -> dict[str, Any]:
        with lock:  # torch's random generator is one for all threads
            model = uses.model_of(use)
        optimizer = ddl.DistributedOptimizer(uses.optimizer_of(model), named_parameters=model.named_parameters())
        scheduler, data = uses.scheduler_of(optimizer), uses.Rows()
        sampler = elastic.ElasticSampler(data, seed=4)
        state = elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, done=0)
        scaler = uses.scaler_of(use)

        @elastic.run
        def train(state: Any) -> None:
            rows = uses.GLOBAL_BATCH // ddl.size()
            loader = torch.utils.data.DataLoader(data, rows, sampler=state.sampler, num_workers=workers)
            while state.done < steps:
                for number, samples in enumerate(loader):
                    loss = uses.loss_of(use, model, model, samples, ddl.size(), state.done)
                    if (error := fails(place, state.done)) is not None:
                        raise error
                    uses.apply(use, loss, state.optimizer, state.scheduler, scaler)
                    state.sampler.record_batch(number, rows)
                    state.done += 1
                    state.commit()
                state.sampler.set_epoch(state.sampler.epoch + 1)

        train(state)
        return {name: value.clone() for name, value in model.state_dict().items()}

    return play


def check(result: Any, use: str, steps: int) -> None:
    """Compare a rank's weights with those of one process, and the counts: each sample is used once an epoch."""
    assert isinstance(result, dict), result
    assert (result["uses.weight"] == steps * uses.GLOBAL_BATCH // uses.SAMPLES).all(), result["uses.weight"]
    wanted = expected(use, steps)
    assert result.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (result[name] - value).abs().max() <= 1e-10, name


@pytest.mark.parametrize("again", [False, True], ids=["for good", "and comes again"])
def test_a_rank_with_sparse_gradients_dies(again: bool) -> None:
    """The ranks that are left have the weights of one process, and no sample is lost or used twice."""
    steps, deaths = 12, {(1, 5)}

    def fails(place: int, step: int) -> BaseException | None:
        if (place, step) not in deaths:
            return None
        deaths.remove((place, step))
        return Killed(again)

    job = ElasticThreads(3, trained("sparse", steps, fails))
    results = {place: one for place, one in job.play().items() if not isinstance(one, SystemExit)}  # it came too late
    assert job.deaths == 1
    assert {0, 2} <= results.keys()
    for result in results.values():
        check(result, "sparse", steps)


def test_a_step_is_computed_again_with_workers_of_a_loader(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error, new workers deal the samples that are left; the workers of both end without a complaint."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest's would keep what a worker says
    steps, failed = 8, list[int]()

    def fails(place: int, step: int) -> BaseException | None:
        if step != 2 or failed:
            return None
        failed.append(step)
        return DdlInternalError("computes the step again")

    results = ElasticThreads(1, trained("workers", steps, fails, workers=1)).play()
    assert failed == [2]
    check(results[0], "workers", steps)
    shown = capfd.readouterr().err
    assert "Exception ignored" not in shown and "Traceback" not in shown, shown


def chaos_with_sparse_gradients(size: int, faults: int, seed: int, steps: int, folder: Path, pause_s: float) -> None:
    """Train with sparse gradients while ranks are killed; all that are left have the weights of one process."""
    variables = {"USE": "sparse", "STEPS": str(steps), "RANKS": str(size)}
    done, text = chaos([str(PROGRAM)], size, faults, seed, folder, pause_s, 6.0, **variables)
    assert done == faults, text
    assert check_sparse(folder, text, steps) == size, text


def check_sparse(folder: Path, text: str, steps: int) -> int:
    """Check the results in ``folder``, and return how many ranks were left. ``text`` is what the job has written."""
    wanted, epochs = expected("sparse", steps), steps * uses.GLOBAL_BATCH // uses.SAMPLES
    results = [torch.load(file) for file in folder.glob("result*")]
    size = len(results)
    assert size == len(re.findall(f"result {steps} on {size}", text)), text
    for result in results:
        assert (result["uses.weight"] == epochs).all(), (text, result["uses.weight"])
        for name, value in wanted.items():
            assert (result[name] - value).abs().max() <= 1e-10, (name, text)
    return size


@pytest.mark.long
def test_ranks_are_killed_at_random_with_sparse_gradients(tmp_path: Path) -> None:
    chaos_with_sparse_gradients(3, 4, 1, 160, tmp_path / "pids", 0.05)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "2"))))
def test_a_hundred_kills_with_sparse_gradients(seed: int, tmp_path: Path) -> None:
    chaos_with_sparse_gradients(4, 100, seed, 2000, tmp_path / "pids", 0.1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "1"))))
def test_a_storm_with_sparse_gradients(
    new_cluster: NewCluster, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Ranks are killed, hosts hang or are cut off, and the launcher's host is lost."""
    steps = 1000

    def check(folder: Path, text: str) -> None:
        assert check_sparse(folder, text, steps) >= 2, text

    with plan(request, seed, tmp_path):
        more = {"USE": "sparse", "RANKS": "2"}
        stormy(HostChaos(new_cluster(4), tmp_path, steps, seed, 1700.0, [str(PROGRAM)], more, check), seed, 20, 6)
