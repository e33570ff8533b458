"""Trains on every rank in each possible way; rank 0 writes the files for inference, and what they should predict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ddl_tf as ddl
import ddl_tf.keras
import keras
import numpy as np
import tensorflow as tf
import tf_keras

PYTHON_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
INPUTS = np.random.default_rng(0).random((64, 4), np.float32)
CLASSES = INPUTS.argmax(axis=1)


def communicates(graph: Any) -> bool:
    """Return whether the graph, or one of its functions, calls Python."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return bool(PYTHON_OPS & {node.op for node in nodes})


def fitted(library: Any) -> Any:
    """Return a model of Keras 3 or tf_keras after model.fit."""
    layers = [library.layers.Dense(8, activation="relu"), library.layers.Dense(4)]
    model = library.Sequential([library.layers.Input((4,)), *layers])
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = ddl_tf.keras.DistributedOptimizer(library.optimizers.Adam(0.01))
    model.compile(optimizer, loss, jit_compile=False)
    shown = [ddl_tf.keras.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(INPUTS, CLASSES, epochs=2, verbose=0, callbacks=shown)
    return model


class Taped(tf.Module):  # type: ignore[misc] # TensorFlow has no types
    """A handwritten model with its training step, both in tf.functions."""

    def __init__(self) -> None:
        self.weights = tf.Variable(tf.ones((4, 4)))
        self.predict = tf.function(lambda inputs: inputs @ self.weights, [tf.TensorSpec((None, 4))])

    def step(self, inputs: Any, classes: Any) -> None:
        with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(classes, self.predict(inputs)))
        self.weights.assign_sub(0.1 * tape.gradient(loss, self.weights))


def taped() -> Taped:
    model = Taped()
    step = tf.function(model.step).get_concrete_function(tf.constant(INPUTS), tf.constant(CLASSES))
    assert communicates(step.graph)
    step(tf.constant(INPUTS), tf.constant(CLASSES))
    return model


def session(folder: Path) -> Any:
    """Train in a session of TensorFlow 1, write a frozen graph and a checkpoint, and return their predictions."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session() as running:
        inputs = v1.placeholder(tf.float32, (None, 4), name="inputs")
        weights = v1.get_variable("weights", (4, 4), use_resource=True)
        logits = tf.identity(inputs @ weights, name="logits")
        loss = v1.losses.sparse_softmax_cross_entropy(CLASSES, logits)
        train = ddl.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1)).minimize(loss)
        begin = ddl.broadcast_global_variables(0)
        running.run(v1.global_variables_initializer())
        running.run(begin)
        running.run(train, {inputs: INPUTS})
        assert communicates(graph)
        frozen = v1.graph_util.convert_variables_to_constants(running, graph.as_graph_def(), ["logits"])
        if ddl.rank() == 0:
            (folder / "frozen.pb").write_bytes(frozen.SerializeToString())
            v1.train.Saver().save(running, str(folder / "checkpoint" / "model"))
        return running.run(logits, {inputs: INPUTS})


def main() -> None:
    folder = Path(sys.argv[1])
    ddl.init()
    models = {"keras": fitted(keras), "tf_keras": fitted(tf_keras), "tape": taped()}
    expected = {"session": session(folder)}
    if ddl.rank() == 0:
        models["keras"].export(folder / "keras", verbose=False)
        models["keras"].save(folder / "whole.keras")
        models["tf_keras"].save(str(folder / "tf_keras"), save_format="tf")
        tf.saved_model.save(models["tape"], str(folder / "tape"), signatures=models["tape"].predict)
        expected["keras"] = np.asarray(models["keras"](INPUTS))
        expected["tf_keras"] = np.asarray(models["tf_keras"](INPUTS))
        expected["tape"] = np.asarray(models["tape"].predict(INPUTS))
        np.savez(folder / "expected.npz", inputs=INPUTS, **expected)


if __name__ == "__main__":
    main()
