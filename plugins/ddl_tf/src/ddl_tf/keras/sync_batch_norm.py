"""Batch normalization over the batches of all ranks, for Keras 3 and tf_keras.

The ranks may have different numbers of rows. The forward pass gathers (mean, squared deviations, count) from every rank
and combines them in rank order (Chan, Golub and LeVeque 1979). This avoids the loss of precision that sums of squares
would cause. The backward pass adds two sums per channel over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl_tf import ops
from ddl_tf.keras.families import the_keras
from ddlcore.api import current_job, is_initialized
from ddlcore.api.world import elastic_member
from ddlcore.types import Sum

_keras: Any = the_keras()
_BatchNormalization: Any = _keras.layers.BatchNormalization
_register: Any = getattr(_keras, "saving", _keras.utils).register_keras_serializable

DIGIT = 2**24  # counts are sent as two digits to this base: float32 holds integers up to it


@_register("ddl")
class SyncBatchNormalization(_BatchNormalization):  # type: ignore[misc]  # Keras has no types
    """The layer ``tf.keras.layers.BatchNormalization``, computed over the batches of all ranks together.

    All ranks must run their layers of this class in the same order. The layers are matched by this order; their names
    may differ. In inference, and in a job of one rank, this layer does the same as Keras' layer. The moving variance is
    the biased one, as in Keras without ``fused``. Raises ValueError if ``fused=True``, renorm or virtual batches are
    requested.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        for refused in ("renorm", "virtual_batch_size", "adjustment", "synchronized"):
            if kwargs.get(refused):
                raise ValueError(f"SyncBatchNormalization does not support {refused}={kwargs[refused]!r}.")
            kwargs.pop(refused, None)
        super().__init__(**kwargs)

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Return the normalized inputs, in the type and layout of ``inputs``."""
        job = current_job() if is_initialized() else None
        training = self._training(training)
        if job is None or (job.size == 1 and elastic_member() is None) or training is False or not self.trainable:
            return super().call(inputs, training=training, mask=mask)
        if training is True:
            return self._normalized(inputs, mask)
        bare = super().call
        return tf.cond(
            tf.cast(training, tf.bool),
            lambda: self._normalized(inputs, mask),
            lambda: bare(inputs, training=False, mask=mask),
        )

    def _training(self, training: Any) -> Any:
        """Return whether this is training: True, False, or in a v1 graph a tensor that will hold the value."""
        if training is None:
            learning_phase = getattr(_keras.backend, "learning_phase", None)  # of tf_keras
            training = False if learning_phase is None else learning_phase()
        return training if tf.is_tensor(training) else bool(training)

    def _normalized(self, inputs: Any, mask: Any) -> Any:
        kind = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        x = tf.cast(inputs, kind)
        axis = int(np.ravel(self.axis)[0]) % len(x.shape)  # tf_keras has a list of one
        axes = [i for i in range(len(x.shape)) if i != axis]
        weights = None if mask is None else tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(x)), kind)
        mean, variance = _moments(x, weights, axes)
        self._track(mean, variance)
        scale = tf.math.rsqrt(variance + tf.constant(self.epsilon, kind))
        if self.scale:
            scale *= tf.cast(tf.convert_to_tensor(self.gamma), kind)
        output = (x - _aligned(mean, x, axes)) * _aligned(scale, x, axes)
        if self.center:
            output += _aligned(tf.cast(tf.convert_to_tensor(self.beta), kind), x, axes)
        return tf.cast(output, self.compute_dtype)

    def _track(self, mean: Any, variance: Any) -> None:
        for moving, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            before = tf.convert_to_tensor(moving)
            factor = tf.constant(1.0 - self.momentum, before.dtype)
            update = moving.assign(before + (tf.cast(value, before.dtype) - before) * factor)
            if not tf.compat.v1.executing_eagerly_outside_functions():  # tf_keras in a v1 graph
                self.add_update(update)


def _moments(x: Any, weights: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """Return the mean and the biased variance of each channel over the values of all ranks.

    ``weights`` are 0 for the values that a mask excludes and 1 for the others. ``axes`` are all axes except the channel
    axis.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def moments(values: Any) -> tuple[Any, Any]:
        mean, variance, total, aligned = _joined(values, weights, axes)

        def gradient(by_mean: Any, by_variance: Any) -> Any:
            sums = ops.allreduce(tf.stack([by_mean, by_variance]), op=Sum)  # (2, channels)
            by_mean, by_variance = (_aligned(part, values, axes) for part in tf.unstack(sums))
            result = (by_mean + by_variance * 2.0 * (values - aligned)) / total
            return result if weights is None else result * weights

        return (mean, variance), gradient

    result: tuple[Any, Any] = moments(x)
    return result


def _joined(x: Any, weights: Any, axes: Sequence[int]) -> tuple[Any, Any, Any, Any]:
    """Return mean, variance and number of values per channel over all ranks, and the mean in the layout of ``x``.

    ``weights`` are 0 for the values that a mask excludes and 1 for the others. ``axes`` are all axes except the channel
    axis.
    """
    kind = x.dtype
    if weights is None:
        count = tf.reduce_prod(tf.gather(tf.shape(x, tf.int64), axes))  # values of a channel on this rank
    else:
        count = tf.reduce_sum(tf.cast(tf.gather(weights, 0, axis=_channel_axis(x, axes)), tf.int64))
    rows = tf.cast(tf.maximum(count, 1), kind)
    mean = tf.reduce_sum(x if weights is None else x * weights, axes) / rows  # (channels,), of this rank
    squares = tf.square(x - _aligned(mean, x, axes))
    deviation = tf.reduce_sum(squares if weights is None else squares * weights, axes)
    digits = tf.cast(tf.stack([count % DIGIT, count // DIGIT]), kind)
    own = tf.concat([mean, deviation, digits], 0)
    everyones = ops.allgather(own[tf.newaxis])  # (ranks, 2 * channels + 2)
    channels = mean.shape[0]
    means, deviations, counts = tf.split(everyones, [channels, channels, 2], axis=1)
    numbers = tf.cast(counts[:, :1], tf.float64) + tf.cast(counts[:, 1:], tf.float64) * DIGIT  # (ranks, 1)
    total = tf.maximum(tf.reduce_sum(numbers), 1.0)
    share = tf.cast(numbers / total, kind)
    joined = tf.reduce_sum(means * share, 0)
    variance = tf.reduce_sum(deviations, 0) / tf.cast(total, kind) + tf.reduce_sum((means - joined) ** 2 * share, 0)
    return joined, variance, tf.cast(total, kind), _aligned(joined, x, axes)


def _channel_axis(x: Any, axes: Sequence[int]) -> int:
    return next(i for i in range(len(x.shape)) if i not in axes)


def _aligned(channels: Any, x: Any, axes: Sequence[int]) -> Any:
    """Return ``channels``, a tensor of one value per channel, in a shape that broadcasts against ``x``."""
    return tf.reshape(channels, [1 if i in axes else -1 for i in range(len(x.shape))])
