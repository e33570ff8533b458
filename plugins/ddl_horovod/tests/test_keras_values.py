"""The collectives of horovod.keras and horovod.tensorflow.keras: what they take and return."""

from __future__ import annotations

from typing import Any

import horovod.keras
import horovod.tensorflow.keras
import numpy as np
import pytest
import tensorflow as tf

from ddlcore.testing import run_world

PACKAGES = pytest.mark.parametrize("hvd", [horovod.keras, horovod.tensorflow.keras], ids=lambda one: str(one.__name__))
VERBS = {  # arguments behind the value, and the result for the values 1 and 3, 1 and 3
    "allreduce": ((), [2.0, 2.0]),
    "allgather": ((), [1.0, 1.0, 3.0, 3.0]),
    "broadcast": ((1,), [3.0, 3.0]),
    "reducescatter": ((), [2.0]),
}


@PACKAGES
@pytest.mark.parametrize("verb", sorted(VERBS))
def test_tensors_come_back_eagerly(verb: str, hvd: Any) -> None:
    """The type is the one that tf.constant gives: float32 for Python's numbers, and its own for an array or a tensor."""
    more, expected = VERBS[verb]

    def program(rank: int, job: Any) -> None:
        value = [1.0 + 2 * rank] * 2
        for given, dtype in (
            (value, tf.float32),
            (np.array(value), tf.float64),
            (tf.constant(value, tf.float16), tf.float16),
        ):
            result = getattr(hvd, verb)(given, *more)
            assert isinstance(result, tf.Tensor) and result.dtype == dtype
            np.testing.assert_array_equal(result.numpy(), expected)

    run_world(2, program)


@PACKAGES
@pytest.mark.parametrize("verb", sorted(VERBS))
def test_values_come_back_in_a_graph(verb: str, hvd: Any) -> None:
    """There, the result is an array of NumPy, of the same types."""
    more, expected = VERBS[verb]

    def program(rank: int, job: Any) -> None:
        with tf.Graph().as_default():
            result = getattr(hvd, verb)([1.0 + 2 * rank] * 2, *more)
        assert isinstance(result, np.ndarray) and result.dtype == np.float32
        np.testing.assert_array_equal(result, expected)

    run_world(2, program)


@PACKAGES
def test_the_operation(hvd: Any) -> None:
    """It is an average unless ``op`` says otherwise; factors are passed on."""

    def program(rank: int, job: Any) -> list[float]:
        results = [hvd.allreduce(rank + 1.0, op=hvd.Sum), hvd.allreduce(rank + 1.0, prescale_factor=4.0)]
        return [float(one) for one in results]

    assert run_world(2, program) == [[3.0, 6.0]] * 2


def test_op_and_average() -> None:
    """In horovod.keras, whose default is average=True, ``op`` takes precedence; in the other package, both are an error."""

    def program(rank: int, job: Any) -> float:
        with pytest.raises(ValueError, match="average"):
            horovod.tensorflow.keras.allreduce(1.0, average=True, op=horovod.tensorflow.keras.Sum)
        return float(horovod.keras.allreduce(rank + 1.0, average=True, op=horovod.keras.Sum))

    assert run_world(2, program) == [3.0, 3.0]
