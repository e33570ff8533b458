"""A step of a Keras model in a tf.function, and how long steps take; knows nothing of how gradients are reduced."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tools.training.on_tf.models import Workload, batches

__all__ = ["Momentum", "TfContender", "mean_loss"]

LEARNING_RATE = 1e-4  # small: training on noise must not diverge

Step = Callable[[Any, Any], Any]  # (inputs, classes) -> loss


class Momentum:
    """SGD with momentum as TensorFlow's own kernel, with one operation for each variable.

    Keras 3's SGD needs five operations, which would hide much of what communication costs.
    """

    def __init__(self, model: Any) -> None:
        self.variables = [variable.value for variable in model.trainable_variables]  # TensorFlow's, not Keras's
        self._momenta = [tf.Variable(tf.zeros_like(variable)) for variable in self.variables]

    def apply(self, gradients: Sequence[Any]) -> None:
        """Update the variables. Call this within a tf.function."""
        for variable, momentum, gradient in zip(self.variables, self._momenta, gradients):
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.handle, accum=momentum.handle, lr=LEARNING_RATE, grad=gradient, momentum=0.9
            )


def mean_loss(model: Any, inputs: Any, classes: Any) -> Any:
    """Return the mean loss of a batch."""
    logits = model(inputs, training=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits))


class TfContender:
    """``step`` of a model, compiled, with the inputs of ``rank``. ``meet`` is called after each step."""

    def __init__(
        self, workload: Workload, rank: int, variables: Sequence[Any], step: Step, meet: Callable[[], None] | None
    ) -> None:
        self.variables = variables
        self._step = tf.function(step, jit_compile=False)
        self._batches = [tuple(map(tf.constant, batch)) for batch in batches(workload, rank)]
        self._meet = meet
        self._taken = 0

    def meeting(self, meet: Callable[[], None]) -> TfContender:
        """Return a contender for the same training that also meets the other ranks after each step."""
        other = copy.copy(self)
        other._meet = meet
        return other

    def steps(self, count: int) -> float:
        """Take ``count`` steps, and return the seconds of one."""
        begun_s = time.perf_counter()
        for _ in range(count):
            loss = self._step(*self._batches[self._taken % len(self._batches)])
            self._taken += 1
            if self._meet is not None:
                self._meet()
        np.asarray(loss)  # waits for the last step, in case TensorFlow runs asynchronously
        return (time.perf_counter() - begun_s) / count

    def parameters(self) -> list[npt.NDArray[np.float32]]:
        """Return the current parameters."""
        return [np.asarray(variable) for variable in self.variables]
