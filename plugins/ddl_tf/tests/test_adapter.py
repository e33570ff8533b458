"""The TensorFlow adapter passes the standard suite, and its refusals of TensorFlow's special tensors say what to do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ddl_tf as ddl
import pytest
import tensorflow as tf
from ddl_tf.adapter import TfAdapter
from ddl_tf.conformance import TfSuite

from ddlcore.contracts.transport import Memory
from ddlcore.types import DType
from plugins.ddl_tf.tests.worlds import ranks


class TestTfAdapter(TfSuite):
    """The adapter suite as `ddl conform tensorflow` runs it."""


def _symbolic() -> Any:
    with tf.Graph().as_default():
        return tf.zeros(3)


@pytest.mark.parametrize(
    ("make", "way_out"),
    [
        (lambda: tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])), "convert_to_tensor"),
        (lambda: tf.cast(tf.zeros(3), tf.qint8), "tf.cast"),
        (lambda: tf.constant("a"), "not supported"),
        (lambda: tf.Variable([1.0]), "convert_to_tensor"),
        (_symbolic, "symbolic"),
        (lambda: [1.0], "convert_to_tensor"),
    ],
    ids=["slices", "quantized", "string", "variable", "symbolic", "list"],
)
def test_refusals(make: Any, way_out: str) -> None:
    """Unsupported tensors raise a ValueError that says what to call."""
    with pytest.raises(ValueError, match=way_out):
        TfAdapter().buffer(make(), elementwise=True)


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
def test_adopted_memory_is_let_go_with_the_tensor(dtype: DType) -> None:
    """A tensor made of memory uses it without a copy, and the memory lives exactly as long as the tensor."""
    memory = Memory(64)
    gone = weakref.ref(memory)
    tensor = TfAdapter().adopt(memory, (2, 2), dtype, None)
    address = memory.address
    del memory
    gc.collect()
    assert gone() is not None
    assert TfAdapter().buffer(tensor, elementwise=True).address == address
    assert tensor.dtype.name == dtype.label
    del tensor
    gc.collect()
    assert gone() is None


def test_a_range_can_be_entered_whether_a_profiler_runs_or_not() -> None:
    """A range may have any name, and errors inside it pass through."""
    one = TfAdapter().range("ddl ALLREDUCE x")
    assert one is not None
    with pytest.raises(KeyError), one:
        raise KeyError


def test_shapes_of_tensorflow_1() -> None:
    """In a program that has disabled the behaviour of TensorFlow 2, a shape consists of Dimension objects, not numbers."""

    def play(rank: int) -> None:
        tensor = tf.fill([2, 3], rank + 1.0)
        assert ddl.allreduce(tensor, op=ddl.Sum).numpy().tolist() == [[6.0] * 3] * 2
        assert ddl.allgather(tensor).shape.as_list() == [6, 3]
        assert ddl.allreduce(tf.complex(tensor, tensor), op=ddl.Sum).numpy().tolist() == [[6.0 + 6.0j] * 3] * 2
        with pytest.raises(ValueError, match="string is not supported"):
            ddl.broadcast(tf.constant(["a"]), 0)

    tf.compat.v1.disable_v2_tensorshape()
    try:
        ranks(play)
    finally:
        tf.compat.v1.enable_v2_tensorshape()
