"""The files that a training leaves contain only TensorFlow's operations.

They load and predict where ddl is not installed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import ddl_tf as ddl
import ddl_tf.keras as ddl_keras
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from plugins.ddl_tf.tests.worlds import ranks
from plugins.ddl_torch.tests.launching import launch

PROGRAMS = Path(__file__).parent / "programs"


def foreign(*graphs: Any) -> list[str]:
    """Return the operations of the graphs and of their functions that call Python, or that are named after ddl."""
    nodes = [node for graph in graphs for node in graph.node]
    nodes += [node for graph in graphs for function in graph.library.function for node in function.node_def]
    assert nodes
    return [f"{node.op} {node.name}" for node in nodes if "PyFunc" in node.op or "ddl" in node.name.lower()]


@pytest.mark.timeout(120)
def test_a_model_of_keras_leaves_nothing_of_ddl(tmp_path: Path) -> None:
    """After a step on two ranks, a .keras file and an export have no class, operation or name of ddl."""

    def play(rank: int) -> list[str]:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(ddl_keras.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5)), "mse")
        step = tf.function(model.optimizer.apply)
        model.optimizer.build(model.trainable_variables)
        step([tf.ones((4, 2)), tf.ones(2)])
        assert foreign(step.get_concrete_function([tf.ones((4, 2)), tf.ones(2)]).graph.as_graph_def())
        if rank:
            return []
        model.save(tmp_path / "whole.keras")
        with zipfile.ZipFile(tmp_path / "whole.keras") as whole:
            texts = [whole.read(name).decode().lower() for name in whole.namelist() if name.endswith(".json")]
        model.export(tmp_path / "export", verbose=False)
        saved = SavedModel.FromString((tmp_path / "export" / "saved_model.pb").read_bytes())
        return [*(text for text in texts if "ddl" in text), *foreign(*(one.graph_def for one in saved.meta_graphs))]

    assert ranks(play, 2) == [[], []]


@pytest.mark.timeout(120)
def test_a_module_with_its_training_step_leaves_nothing_of_ddl(tmp_path: Path) -> None:
    """A SavedModel of a module whose step was traced with a distributed tape has only TensorFlow's operations."""

    class Module(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
        def __init__(self) -> None:
            self.weights = tf.Variable(tf.ones((4, 2)))
            self.predict = tf.function(lambda inputs: inputs @ self.weights, [tf.TensorSpec((None, 4))])

        def step(self, inputs: Any) -> None:
            with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(self.predict(inputs))
            self.weights.assign_sub(tape.gradient(loss, self.weights))

    def play(rank: int) -> list[str]:
        module = Module()
        step = tf.function(module.step)
        step(tf.fill((1, 4), rank + 1.0))
        np.testing.assert_array_equal(module.weights, np.full((4, 2), -0.5))
        assert foreign(step.get_concrete_function(tf.ones((1, 4))).graph.as_graph_def())
        if rank:
            return []
        tf.saved_model.save(module, str(tmp_path), signatures=module.predict)
        saved = SavedModel.FromString((tmp_path / "saved_model.pb").read_bytes())
        return foreign(*(one.graph_def for one in saved.meta_graphs))

    assert ranks(play, 2) == [[], []]


@pytest.mark.timeout(120)
def test_a_session_leaves_nothing_of_ddl(tmp_path: Path) -> None:
    """A frozen graph has only TensorFlow's operations, and a checkpoint only the user's variables."""
    v1 = tf.compat.v1

    def play(rank: int) -> tuple[list[str], list[str]]:
        with tf.Graph().as_default() as graph, v1.Session() as session:
            inputs = v1.placeholder(tf.float32, (None, 4), name="inputs")
            weights = v1.get_variable("weights", (4, 2), use_resource=True)
            outputs = tf.identity(inputs @ weights, name="outputs")
            optimizer = ddl.DistributedOptimizer(v1.train.MomentumOptimizer(0.5, 0.5))
            train = optimizer.minimize(tf.reduce_sum(outputs))
            session.run(v1.global_variables_initializer())
            session.run(train, {inputs: np.ones((1, 4), np.float32)})
            assert foreign(graph.as_graph_def())
            if rank:
                return [], []
            # TensorFlow also keeps functions that nothing calls, so only the nodes are compared.
            frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["outputs"])
            saved = v1.train.Saver().save(session, str(tmp_path / "model"))
            variables = sorted(name for name, _ in tf.train.list_variables(saved))
            return sorted({node.op for node in frozen.node}), variables

    operations = ["Const", "Identity", "MatMul", "Placeholder"]
    assert ranks(play, 2)[0] == (operations, ["weights", "weights/Momentum"])


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(540)
def test_what_is_left_predicts_without_ddl(tmp_path: Path) -> None:
    """SavedModels, .keras files, a frozen graph and a checkpoint predict without ddl.

    The SavedModels are those of Keras 3, tf_keras and a tape; the frozen graph and the checkpoint are those of a
    session.
    """
    launch(2, PROGRAMS / "exports.py", str(tmp_path), timeout_s=480)
    alone = [sys.executable, "-I", "-S", str(PROGRAMS / "inference.py"), str(tmp_path), sysconfig.get_path("purelib")]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ways = ("frozen", "checkpoint", "whole.keras", "keras", "tf_keras", "tape")
    assert done.stdout.splitlines() == [f"{way} predicts" for way in ways]
