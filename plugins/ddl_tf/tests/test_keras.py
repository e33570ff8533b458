"""ddl_tf.keras on two ranks, with Keras 3 and with tf_keras.

All checks of the program run once, and each is a test here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from tempfile import TemporaryDirectory

import pytest

from plugins.ddl_tf.tests.launching import LEAN, PROGRAMS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PROGRAM = PROGRAMS / "keras_checks.py"
CHECKS = re.findall(r"^@check\((\w*)\)\ndef (\w+)", PROGRAM.read_text(), re.MULTILINE)
KERAS = {"keras3": {}, "legacy": {"TF_USE_LEGACY_KERAS": "1"}}


# The others repeat the work of these with other arguments, or concern single options; all together take two minutes.
FEW = ("ten_steps_come_to_the_same", "all_ranks_begin_alike", "wrong_arguments_are_named")


@cache
def shown_by(keras: str, *chosen: str) -> str:
    """Return what two ranks print while they run the checks ``chosen``, or all checks if none is chosen."""
    with TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2"]
        command = [*run, sys.executable, str(PROGRAM), folder, *chosen]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=480,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **LEAN, **KERAS[keras]},
        )
    return done.stdout


@pytest.mark.slow("two ranks import TensorFlow")
def test_a_few_checks() -> None:
    """With Keras 3, which TensorFlow uses unless the user chooses the older Keras."""
    shown = shown_by("keras3", *FEW)
    assert all(len(re.findall(rf"held {check} ", shown)) == 2 for check in FEW), shown


@pytest.mark.long
@pytest.mark.parametrize(
    ("keras", "check"),
    [
        (keras, check)
        for keras in KERAS
        for only, check in CHECKS
        if not only or only == {"keras3": "KERAS3_ONLY", "legacy": "LEGACY_ONLY"}[keras]
    ],
)
def test_check(keras: str, check: str) -> None:
    """The check passed on both ranks."""
    shown = shown_by(keras)
    held = re.findall(rf"\[(\d)\] held {check} ", shown)
    assert sorted(held) == ["0", "1"], f"{check} did not hold with {keras}:\n{shown[-6000:]}"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_other_backends_are_refused(backend: str) -> None:
    """Other backends raise one line that says what to set, whether or not that framework is installed."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    code = "import ddl_tf.keras"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert f"'{backend}'" in last and "set KERAS_BACKEND=tensorflow" in last


def test_every_check_is_found() -> None:
    """The checks are found by their decorators; none is lost if the pattern changes."""
    assert len(CHECKS) == len(re.findall(r"^@check", PROGRAM.read_text(), re.MULTILINE)) > 20
