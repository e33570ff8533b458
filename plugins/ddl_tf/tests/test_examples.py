"""The examples learn, end with equal parameters to the last bit, and resume from their checkpoints."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.ddl_torch.tests.launching import EXAMPLES

DOCUMENT = (EXAMPLES.parent / "docs" / "tensorflow.md").read_text()
COMMANDS = re.findall(r"(?m)^(?:ddl run .*)?python examples/.*$", DOCUMENT)

# A TensorFlow 1 script as in Horovod's documentation; the loss and the folder are filled in.
SESSION = """
hvd.init()
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
opt = tf.train.AdagradOptimizer(0.01 * hvd.size())
opt = hvd.DistributedOptimizer(opt)
hooks = [hvd.BroadcastGlobalVariablesHook(0)]
train_op = opt.minimize(loss)
checkpoint_dir = args.train_logs if hvd.rank() == 0 else None
with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir,
                                       config=config,
                                       hooks=hooks) as mon_sess:
  while not mon_sess.should_stop():
    # Perform synchronous training.
    mon_sess.run(train_op)
"""
SLIDES = """
hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
learning_rate *= hvd.size()
callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
"""


def statements(source: str) -> list[str]:
    """Return the top-level statements of a script, in a normalized layout."""
    return [ast.unparse(statement) for statement in ast.parse(source).body]


@pytest.mark.parametrize(("name", "published"), [("tf1_session_digits.py", SESSION), ("keras_slides.py", SLIDES)])
def test_published_scripts_move_over_by_their_imports(name: str, published: str) -> None:
    """Every statement of the published script occurs in the example, in the same order."""
    own = iter(statements((EXAMPLES / name).read_text()))
    assert [line for line in statements(published) if line not in own] == []


def facts(shown: str) -> tuple[float, list[str]]:
    """Return the test accuracy in %, and the digest of each rank's parameters."""
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", shown)
    return float(accuracy), re.findall(r"parameters (\w{12})", shown)


def ran(command: str, folder: Path) -> str:
    """Run a command of the document with ``folder`` in place of /tmp, and return what it printed."""
    launcher, python = [sys.executable, "-m", "ddlcore.launch", "run"], sys.executable
    words = command.replace("/tmp/", f"{folder}/").replace(" examples/", f" {EXAMPLES}/").split()
    words = launcher + words[2:] if words[:2] == ["ddl", "run"] else words
    words[words.index("python")] = python
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "DDL_VERIFY_EVERY": "10"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=440, env=os.environ | threads)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [0, 2, 4, 6], ids=["tf2", "keras", "slides", "session"])
def test_an_example_learns_and_resumes(first: int, tmp_path: Path) -> None:
    """Two ranks reach 95 % on the test images with equal parameters; then one rank resumes from the checkpoint."""
    pytest.importorskip("tf_keras", reason="legacy Keras is a package of its own")
    assert len(COMMANDS) == 9
    accuracy, digests = facts(ran(COMMANDS[first], tmp_path))
    assert accuracy >= 95.0
    assert len(digests) == 2 and len(set(digests)) == 1, digests
    shown = ran(COMMANDS[first + 1], tmp_path)
    resumed, (digest,) = facts(shown)
    assert resumed >= 95.0, shown
    assert digest != digests[0], "nothing was trained"
    assert len(set(re.findall(r"[eE]poch (\d+)", shown))) <= 1, "it began anew"
