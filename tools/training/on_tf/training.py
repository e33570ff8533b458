"""A step of a Keras model in a tf.function, and how long many take; knows nothing of how gradients are reduced."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tools.training.on_tf.models import Workload, batches

__all__ = ["TfContender", "mean_loss", "optimizer_for"]

LEARNING_RATE = 1e-4  # small: what is learned from noise must not diverge

Step = Callable[[Any, Any], Any]  # (inputs, classes) -> loss


def optimizer_for(model: Any) -> Any:
    """SGD with its momenta made, so that a traced step makes no variables."""
    optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
    optimizer.build(model.trainable_variables)
    return optimizer


def mean_loss(model: Any, inputs: Any, classes: Any) -> Any:
    """Of a batch."""
    logits = model(inputs, training=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits))


class TfContender:
    """A model with the function that takes a step with it. ``meet`` is called after each step."""

    def __init__(
        self, workload: Workload, rank: int, model: Any, step: Step, meet: Callable[[], None] | None = None
    ) -> None:
        self.model = model
        self._step = tf.function(step, jit_compile=False)
        self._batches = [tuple(map(tf.constant, batch)) for batch in batches(workload, rank)]
        self._meet = meet
        self._taken = 0

    def steps(self, count: int) -> float:
        """Seconds of one of ``count`` steps."""
        begun_s = time.perf_counter()
        for _ in range(count):
            loss = self._step(*self._batches[self._taken % len(self._batches)])
            self._taken += 1
            if self._meet is not None:
                self._meet()
        np.asarray(loss)  # waits for the last step, should TensorFlow ever run ahead here
        return (time.perf_counter() - begun_s) / count

    def parameters(self) -> list[npt.NDArray[np.float32]]:
        """As they are now."""
        return [np.asarray(variable) for variable in self.model.trainable_variables]
