"""Reduces between parts that XLA compiles: parts that the program names ("named"), or parts that TensorFlow chooses."""

from __future__ import annotations

import sys
from typing import Any

import ddl_tf as ddl
import tensorflow as tf

ddl.init()


def before(x: Any) -> Any:
    return tf.reduce_sum(tf.matmul(x, x) * 2 + 1, axis=0)


def after(x: Any) -> Any:
    return tf.reduce_sum(tf.square(x) + 3)


first, last = [tf.function(part, jit_compile="named" in sys.argv) for part in (before, after)]
value = tf.cast(tf.reshape(tf.range(16), (4, 4)) % 5, tf.float32) * (ddl.rank() + 1.0)
expected = float(after(ddl.allreduce(before(value), op=ddl.Sum)))
result = float(tf.function(lambda x: last(ddl.allreduce(first(x), op=ddl.Sum, name="between")))(value))
print("equal" if result == expected else (result, expected))
