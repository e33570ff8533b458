"""A training that loses ranks and gets them back ends with the parameters of one that was not disturbed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plugins.ddl_tf.tests.launching import EXAMPLES, LEAN, PROGRAMS
from tests.faults.chaos import ROOT, chaos, plan
from tests.faults.chaos_of_hosts import HostChaos, NewCluster, stormy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
SHAPES = [(30, 3), (12,), (12,), (12,), (12,), (12, 5), (5,), (5, 1), (1,)]  # the weights of the program's model
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}


def initial_weights(folder: Path) -> Path:
    """Return a file with the weights with which all ranks begin."""
    start = folder / "start.npz"
    numbers = np.random.default_rng(5)
    weights = [numbers.standard_normal(shape) * 0.3 for shape in SHAPES]
    weights[4] = np.abs(weights[4]) + 1  # a variance
    np.savez(start, *weights)
    return start


def run(
    way: str, rollback: str, size: int, kills: int, folder: Path, legacy: bool = False, epochs: int = 4
) -> tuple[list[Any], str]:
    """Train on ``size`` ranks and kill ``kills`` of them; return the results of all ranks, and the whole output."""
    start = initial_weights(folder)
    marks = folder / f"{way}-{size}-{kills}"
    marks.mkdir()
    launcher = [sys.executable, "-m", "ddlcore.launch", "run", "-np", str(size)]
    command = [*launcher, *(["--min-np", "1"] if size > 1 else []), sys.executable]
    command += [str(PROGRAMS / "elastic_training.py"), way, rollback, str(marks), str(kills), str(start)]
    more = {"ELASTIC_RANKS": str(size), "EPOCHS": str(epochs), **({"TF_USE_LEGACY_KERAS": "1"} if legacy else {})}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **QUIET, **LEAN, **more}
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert len(list(marks.iterdir())) == kills, shown
    return results_in(done.stdout), shown


def results_in(text: str) -> list[Any]:
    return [json.loads(line) for line in re.findall(r"(?m)result (\{.*\})$", text)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "rollback", "size", "kills"),
    [("fit", "step", 3, 2), ("function", "step", 2, 2), ("tape", "step", 2, 1), ("eager", "commit", 2, 1)],
)
def test_killed_ranks_change_nothing(way: str, rollback: str, size: int, kills: int, tmp_path: Path) -> None:
    """Weights, averages of batch normalization and Adam's state are those of one undisturbed process.

    The model has sparse gradients, and the optimizer a weight decay, which uses no gradient. The killed ranks come back
    while the others train: graphs that were traced in a world of one rank then run in a world of two.
    """
    ((alone,), _) = run(way, rollback, 1, 0, tmp_path)
    results, shown = run(way, rollback, size, kills, tmp_path)
    assert len(results) == size and {one["size"] for one in results} == {size}, shown
    for one in results:
        np.testing.assert_allclose(one["values"], alone["values"], rtol=0, atol=1e-10, err_msg=shown)
    if way == "fit":
        assert all(one["log"] == list(range(80)) for one in results), shown  # each step, and so each sample, once
    sizes = re.findall(r"from (\d) to (\d) ranks", shown)
    less, more = (str(size), str(size - 1)), (str(size - 1), str(size))
    assert less in sizes and more in sizes, shown


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "1"))))
@pytest.mark.parametrize(("size", "kills"), [(2, 40), (3, 30)])
def test_ranks_are_killed_at_random_in_fit(
    size: int, kills: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are killed from outside in fit(): also while they start, receive the state, or form a new world."""
    epochs = kills  # 20 steps for each kill
    ((alone,), _) = run("fit", "step", 1, 0, tmp_path, epochs=epochs)
    for name, value in {**QUIET, "OUTSIDE": "1", "ELASTIC_RANKS": str(size), "EPOCHS": str(epochs)}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "pids"
    command = [str(PROGRAMS / "elastic_training.py"), "fit", "step", str(folder), "0", str(initial_weights(tmp_path))]
    done, text = chaos(command, size, kills, seed, folder, 0.2, each_s=15.0, STEPS=str(20 * epochs))
    assert done == kills and check_fit(text, alone, epochs) == size, text[-6000:]


def check_fit(text: str, alone: Any, epochs: int) -> int:
    """Check the results in ``text`` of a training in fit(), and return how many ranks were left.

    ``alone`` is the result of one process that was not disturbed.
    """
    results = results_in(text)
    for one in results:
        np.testing.assert_allclose(one["values"], alone["values"], rtol=0, atol=1e-10, err_msg=text[-6000:])
        assert one["log"] == list(range(20 * epochs)), text[-6000:]
    return len(results)


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SOAK_SEEDS", "1"))))
def test_a_storm_in_fit(new_cluster: NewCluster, seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Ranks are killed in fit(), hosts hang or are cut off, and the launcher's host is lost."""
    epochs = 20
    ((alone,), _) = run("fit", "step", 1, 0, tmp_path, epochs=epochs)
    folder = tmp_path / "storm"
    folder.mkdir()
    program = [str(PROGRAMS / "elastic_training.py"), "fit", "step", str(folder), "0", str(initial_weights(tmp_path))]
    more = {**QUIET, **LEAN, "OUTSIDE": "1", "RANKS": "2", "EPOCHS": str(epochs), "PAUSE_S": "0.2"}
    more["PYTHONPATH"] = os.pathsep.join([more["PYTHONPATH"], str(ROOT)])

    def check(_: Path, text: str) -> None:
        assert check_fit(text, alone, epochs) >= 2, text[-6000:]

    with plan(request, seed, folder):
        chaos_of_hosts = HostChaos(new_cluster(4), folder, 20 * epochs, seed, 2300.0, program, more, check, back_s=30.0)
        stormy(chaos_of_hosts, seed, 16, 5)


@pytest.mark.long
def test_killed_ranks_change_nothing_with_legacy_keras(tmp_path: Path) -> None:
    """The same for tf_keras, where two ranks differ from one by 3e-10 also if nothing disturbs them."""
    pytest.importorskip("tf_keras", reason="legacy Keras is a package of its own")
    ((alone,), _) = run("fit", "step", 1, 0, tmp_path, legacy=True)
    results, shown = run("fit", "step", 2, 1, tmp_path, legacy=True)
    assert len(results) == 2, shown
    for one in results:
        np.testing.assert_allclose(one["values"], alone["values"], rtol=0, atol=1e-8, err_msg=shown)


@pytest.mark.long
def test_the_example_goes_on_without_a_rank_and_takes_it_back() -> None:
    """A rank of examples/keras_elastic_digits.py is killed in the training: 95 % on the test images are reached."""
    page = (EXAMPLES.parent / "docs" / "tensorflow.md").read_text()
    (told,) = re.findall(r"(?m)^ddl run (.*) python examples/keras_elastic_digits.py$", page)
    command = [sys.executable, "-m", "ddlcore.launch", "run", *told.split(), sys.executable]
    command += [str(EXAMPLES / "keras_elastic_digits.py"), "--epochs", "20"]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **QUIET}
    )
    shown, victim = "", 0
    assert job.stdout is not None
    with job:
        for line in job.stdout:
            shown += line
            begun = re.search(r"rank 1 of 2 \(process (\d+)\) begins at step 0", line)
            victim = int(begun[1]) if begun else victim
            if victim > 0 and re.search(r"Epoch 3/", line):
                os.kill(victim, signal.SIGKILL)
                victim = -1
    assert job.returncode == 0, shown
    assert victim == -1 and "rank 0 of 1" in shown, shown
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", shown)
    assert float(accuracy) >= 95.0, shown
    assert len(set(re.findall(r"parameters (\w{12})", shown))) == 1, shown
