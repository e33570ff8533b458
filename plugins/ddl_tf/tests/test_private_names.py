"""The list of TensorFlow and Keras's private names is complete, and the installed releases have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ddl_tf
import keras

from tests.private_names import check_private_names

# The names of TensorFlow and Keras that are not public and that ddl_tf uses: the first and the last release in which they were found.
NAMES = {
    "keras.src.optimizers.base_optimizer.BaseOptimizer": "keras 3.12 to 3.16",
    "keras.src.trainers.data_adapters": "keras 3.12 to 3.16",
    "keras.Variable(0.0)._value": "keras 3.12 to 3.16",
    "built(keras.optimizers.Adam())._momentums": "keras 3.12 to 3.16",
    "built(keras.optimizers.Adam())._trainable_variables": "keras 3.12 to 3.16",
    "tensorflow.python.data": "tensorflow 2.16 to 2.22",
    "tensorflow.python.eager.record.should_record_backprop": "tensorflow 2.16 to 2.22",
    "tensorflow.python.framework.auto_control_deps_utils.COLLECTIVE_MANAGER_IDS": "tensorflow 2.16 to 2.22",
    "tensorflow.python.framework.ops.set_int_list_attr": "tensorflow 2.16 to 2.22",
    "tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext": "tensorflow 2.16 to 2.22",
    "tf_keras.src.optimizers.optimizer.Optimizer": "tf_keras 2.21 to 2.21",
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._aggregate_gradients": "tf_keras 2.21 to 2.21",
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._create_all_weights": "tf_keras 2.21 to 2.21",
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._resource_apply_dense": "tf_keras 2.21 to 2.21",
    "tf_keras.src.optimizers.legacy.optimizer_v2.OptimizerV2._resource_apply_sparse": "tf_keras 2.21 to 2.21",
}
OURS = {"_ddl", "_ddl_wrapped", "_first"}  # attributes that this package sets


def built(optimizer: Any) -> Any:
    """Return ``optimizer`` with the variables that it has for one weight."""
    optimizer.build([keras.Variable(0.0)])
    return optimizer


def test_private_names() -> None:
    """A name that a release of one of them has no longer is found here, before anything that uses it."""
    check_private_names(Path(ddl_tf.__file__).parent, NAMES, {"keras": keras, "built": built}, OURS)
