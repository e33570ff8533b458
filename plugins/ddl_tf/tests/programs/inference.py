"""Predicts with the files that a training with ddl has written, in a Python that has TensorFlow and no ddl.

Arguments: the folder, and the path of the packages. Run it with -I and -S, so that nothing else is on the path.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
sys.path.append(sys.argv[2])

import keras  # noqa: E402 - the path comes first
import numpy as np  # noqa: E402 - likewise
import tensorflow as tf  # noqa: E402 - likewise
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel  # noqa: E402 - likewise

FOREIGN = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def reached(graph: Any) -> list[Any]:
    """Return the graph's nodes and those of the functions that it calls.

    TensorFlow also keeps functions that nothing calls.
    """
    functions = {function.signature.name: list(function.node_def) for function in graph.library.function}
    nodes, ahead = [], list(graph.node)
    while ahead:
        node = ahead.pop()
        nodes.append(node)
        values = node.attr.values()
        called = {node.op, *(value.func.name for value in values)}
        called |= {function.name for value in values for function in value.list.func}
        for name in called & functions.keys():
            ahead += functions.pop(name)
    return nodes


def check_ops(name: str, graph: Any) -> None:
    """Check that no node calls Python, and that no node is named after ddl."""
    nodes = reached(graph)
    assert nodes, name
    assert not FOREIGN & {node.op for node in nodes}, name
    assert not [node.name for node in nodes if "ddl" in node.name.lower()], name


def check(name: str, predicted: Any, expected: Any) -> None:
    """Check that the predictions are equal, apart from the rounding of sums."""
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6, err_msg=name)
    print(f"{name} predicts")


def frozen(inputs: Any) -> Any:
    v1 = tf.compat.v1
    graph = v1.GraphDef.FromString((FOLDER / "frozen.pb").read_bytes())
    check_ops("frozen", graph)
    with tf.Graph().as_default(), v1.Session() as session:
        (logits,) = tf.import_graph_def(graph, return_elements=["logits:0"], name="")
        return session.run(logits, {"inputs:0": inputs})


def from_checkpoint(inputs: Any) -> Any:
    """Build the forward pass anew with the weights of a checkpoint, which is what a MonitoredTrainingSession leaves."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        logits = tf.constant(inputs) @ v1.get_variable("weights", (4, 4), use_resource=True)
        v1.train.Saver().restore(session, tf.train.latest_checkpoint(FOLDER / "checkpoint"))
        return session.run(logits)


def main() -> None:
    for package in ("ddl_tf", "ddlcore"):
        assert importlib.util.find_spec(package) is None, f"{package} is here"
    with np.load(FOLDER / "expected.npz") as expected:
        inputs = expected["inputs"]
        check("frozen", frozen(inputs), expected["session"])
        check("checkpoint", from_checkpoint(inputs), expected["session"])
        check("whole.keras", keras.saving.load_model(FOLDER / "whole.keras")(inputs), expected["keras"])
        for name in ("keras", "tf_keras", "tape"):
            saved = SavedModel.FromString((FOLDER / name / "saved_model.pb").read_bytes())
            for graph in saved.meta_graphs:
                check_ops(name, graph.graph_def)
            serve = tf.saved_model.load(str(FOLDER / name)).signatures["serving_default"]
            (predicted,) = serve(tf.constant(inputs)).values()
            check(name, predicted, expected[name])


if __name__ == "__main__":
    main()
