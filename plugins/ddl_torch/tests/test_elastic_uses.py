"""Elastic training with more of PyTorch: a rank is killed and comes back, and the result is that of one process."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import ddl_torch as ddl  # noqa: E402  # needs torch
from ddl_torch import elastic  # noqa: E402

from ddlcore.errors import DdlInternalError  # noqa: E402
from plugins.ddl_torch.tests import elastic_uses as uses  # noqa: E402
from tests.api.elastic.threads import ElasticThreads  # noqa: E402
from tests.faults.chaos import chaos  # noqa: E402

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


def chaos_with_sparse_gradients(size: int, faults: int, seed: int, steps: int, folder: Path, pause_s: float) -> None:
    """Train with sparse gradients while ranks are killed; all that are left have the weights of one process."""
    variables = {"USE": "sparse", "STEPS": str(steps), "RANKS": str(size)}
    done, text = chaos([str(PROGRAM)], size, faults, seed, folder, pause_s, 6.0, **variables)
    assert done == faults, text
    wanted, epochs = expected("sparse", steps), steps * uses.GLOBAL_BATCH // uses.SAMPLES
    results = [torch.load(file) for file in folder.glob("result*")]
    assert len(results) == len(re.findall(f"result {steps} on {size}", text)) == size, text
    for result in results:
        assert (result["uses.weight"] == epochs).all(), (text, result["uses.weight"])
        for name, value in wanted.items():
            assert (result[name] - value).abs().max() <= 1e-10, (name, text)


@pytest.mark.long
def test_ranks_are_killed_at_random_with_sparse_gradients(tmp_path: Path) -> None:
    chaos_with_sparse_gradients(3, 4, 1, 160, tmp_path / "pids", 0.05)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "2"))))
def test_a_hundred_kills_with_sparse_gradients(seed: int, tmp_path: Path) -> None:
    chaos_with_sparse_gradients(4, 100, seed, 2000, tmp_path / "pids", 0.1)
