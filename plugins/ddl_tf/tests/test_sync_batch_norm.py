"""Batch normalization over the batches of all ranks equals that of one device which has all rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.keras import SyncBatchNormalization

from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(120)


def trained(layer: Any, x: Any, upstream: Any, mask: Any, graph: bool) -> list[Any]:
    """Return output, gradients of the input and of the parameters, and moving statistics after one training step."""
    layer.build((None, *x.shape[1:]))
    for i, weight in enumerate(layer.trainable_weights):
        weight.assign(np.linspace(0.5, 1.5, weight.shape[0]) * (i + 1))
    options = {} if mask is None else {"mask": tf.constant(mask)}

    def step(values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            output = layer(values, training=True, **options)
            loss = tf.reduce_sum(output * upstream)
        return output, *tape.gradient(loss, [values, *(weight.value for weight in layer.trainable_weights)])

    results = (tf.function(step) if graph else step)(tf.constant(x))
    return [np.asarray(one) for one in (*results, *layer.non_trainable_weights)]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(("shape", "axis", "masked"), [((4,), -1, False), ((4, 2, 3), 1, False), ((5, 4), -1, True)])
def test_3_and_5_rows_are_normalized_as_8(shape: tuple[int, ...], axis: int, masked: bool, graph: bool) -> None:
    """The output, the gradients and the moving statistics are those of Keras' layer with the rows of both ranks."""
    rng = np.random.default_rng(4)
    x, upstream = rng.normal(5.0, 2.0, (8, *shape)), rng.normal(size=(8, *shape))
    mask = rng.random((8, shape[0])) < 0.6 if masked else None
    options: dict[str, Any] = {"axis": axis, "momentum": 0.5, "dtype": "float64"}
    whole = trained(keras.layers.BatchNormalization(**options), x, upstream, mask, False)

    def play(rank: int, job: Any) -> list[Any]:
        here = slice(3, 8) if rank else slice(0, 3)
        own = None if mask is None else mask[here]
        return trained(SyncBatchNormalization(**options), x[here], upstream[here], own, graph)

    first, second = run_world(2, play)
    output, by_input, by_gamma, by_beta, mean, variance = range(6)
    found = {number: np.concatenate([first[number], second[number]]) for number in (output, by_input)}
    # The gradients of the parameters are each rank's own; the optimizer reduces them.
    found |= {number: first[number] + second[number] for number in (by_gamma, by_beta)}
    found |= {number: first[number] for number in (mean, variance)}
    for number, value in found.items():
        # Keras adds 1e-7 to the count of a mask.
        np.testing.assert_allclose(value, whole[number], rtol=0, atol=1e-6 if masked else 1e-10, err_msg=str(number))
    for number in (mean, variance):
        np.testing.assert_array_equal(first[number], second[number])


def test_inference_asks_no_other_rank() -> None:
    """In inference one rank alone may call the layer, which uses its moving statistics, also after it was loaded."""

    def play(rank: int, job: Any) -> None:
        if rank:
            return
        layer = SyncBatchNormalization()
        loaded = keras.layers.deserialize(keras.layers.serialize(layer))
        assert type(loaded) is SyncBatchNormalization
        for one in (layer, loaded):
            np.testing.assert_allclose(one(tf.fill((2, 3), 5.0), training=False), np.full((2, 3), 5.0), rtol=1e-3)

    run_world(2, play)


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(ValueError, match="fused"):
        SyncBatchNormalization(fused=True)
    with pytest.raises(ValueError, match="renorm"):
        SyncBatchNormalization(renorm=True)
