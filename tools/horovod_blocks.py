"""Makes programs of the blocks of Python in Horovod's documentation: with what a block leaves out, or says in dots."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BLOCKS", "Block", "blocks_of", "program_of"]


@dataclass(frozen=True)
class Block:
    """How a block is run: what stands ``before`` and ``behind`` it, or ``why_not``.

    ``before`` has a name ``made_x`` for each line ``x = ...`` of the block.
    """

    before: str = ""
    behind: str = ""
    standins: tuple[str, ...] = ("data", "short")
    flags: str = ""
    ranks: int | None = None
    service: str | None = None
    why_not: str = ""


_PART = Block(why_not="Part of a whole example on the same page.")
_RAY = Block(why_not="Not here yet: it needs horovod.ray.")
_SPARK = Block(why_not="Not here yet: it needs horovod.spark.")
_SOURCES = Block(why_not="A sketch of a change to Horovod's own sources, not of a script.")
_ADASUM = Block(why_not="It does not run with Horovod either: hvd.AdaSum is spelled hvd.Adasum.")

_V1 = ("data", "short", "tensorflow 1")
_LOOPS = "lr = base_lr = 0.01\nepochs, batches_per_epoch, batches_per_commit = 2, 3, 2\n"

_TENSORFLOW_1 = """
import numpy as np
import tensorflow as tf
tf.train.get_or_create_global_step()
x = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(np.ones((40, 4), "float32")).batch(4)).get_next()
weight = tf.get_variable("weight", [4, 1])
loss = made_loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) - 1))
made_model = made_dataset = None
"""
_KERAS = """
import tensorflow as tf
from tensorflow import keras
images, labels = tf.keras.datasets.mnist.load_data()[0]
made_dataset = tf.data.Dataset.from_tensor_slices((images.astype("float32") / 255, labels)).repeat().batch(32)
layers = [tf.keras.layers.Flatten(input_shape=(28, 28)), tf.keras.layers.Dense(10, activation="softmax")]
model = mnist_model = made_model = tf.keras.Sequential(layers)
def get_random_batch():
    return tf.random.uniform([8, 28, 28]), tf.one_hot(tf.range(8), 10)
"""
_TORCH = """
import types
import torch
import torch.nn.functional as F
import torch.optim as optim
args = types.SimpleNamespace(log_interval=1)
def get_random_batch():
    return torch.rand(8, 4), torch.arange(8) % 3
made_train_dataset = made_dataset = torch.utils.data.TensorDataset(*get_random_batch())
made_model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LogSoftmax(dim=1))
"""
_MXNET = """
import mxnet as mx
made_model = mx.gluon.nn.HybridSequential()
made_model.add(mx.gluon.nn.Dense(10))
made_optimizer_params = {"learning_rate": 0.1}
made_loss_fn = mx.gluon.loss.SoftmaxCrossEntropyLoss()
initializer, dtype, num_epoch, batch_size = mx.init.Xavier(), "float32", 2, 8
train_data = mx.io.NDArrayIter(mx.nd.ones((32, 4)), mx.nd.zeros((32,)), batch_size)
"""
_OPTIMIZER_1 = f"""{_TENSORFLOW_1}
import horovod.tensorflow as hvd
hvd.init()
opt = tf.train.MomentumOptimizer(0.1, 0.9)
"""
_STEP_1 = """
train = opt.minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(train)
"""
_SETS = """
import torch
import horovod.torch as hvd
tensor_for_even_ranks, tensor_for_odd_ranks = torch.ones(3), torch.zeros(3)
"""
_SERVICE = """
import tensorflow as tf
import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service
dataset, reuse_dataset, round_robin = tf.data.Dataset.range(1000), False, False
"""
_READ = """for batch in dataset.take(3):
    print(batch.numpy().sum())
hvd.allreduce(tf.ones(1), name="all ranks have read")
if rank == 0:
    compute_config.compute_client(verbose=2).shutdown()
"""

BLOCKS: dict[str, Block] = {
    **{f"adasum_user_guide.rst#{number}": _ADASUM for number in (1, 2, 3, 4)},
    **{f"contributors.rst#{number}": _SOURCES for number in (1, 2, 3)},
    "elastic.rst#1": Block(_LOOPS + _TENSORFLOW_1, standins=_V1, flags="--min-np 2"),
    "elastic.rst#2": Block(_LOOPS + _KERAS, flags="--min-np 2"),
    "elastic.rst#3": Block(_LOOPS + _KERAS, standins=_V1, flags="--min-np 2"),
    "elastic.rst#4": Block(_LOOPS + _TORCH, standins=("no gpu",), flags="--min-np 2"),
    "elastic.rst#5": _RAY,
    "gpus.rst#1": Block(_OPTIMIZER_1, _STEP_1, standins=_V1),
    "gpus.rst#2": Block(_OPTIMIZER_1, _STEP_1, standins=_V1),
    **{f"hyperparameter_search.rst#{number}": _RAY for number in range(1, 7)},
    "keras.rst#1": _PART,
    "keras.rst#2": _PART,
    "keras.rst#3": Block(standins=_V1),
    "keras.rst#4": Block(_KERAS),
    "mxnet.rst#1": Block(_MXNET, standins=("no gpu",)),
    "process_set.rst#1": Block(_SETS, standins=(), ranks=4),
    "process_set.rst#2": Block(_SETS, standins=(), ranks=4, flags="--mpi"),
    "process_set.rst#3": Block(_SETS, standins=(), ranks=4),
    "pytorch.rst#1": _PART,
    "pytorch.rst#2": _PART,
    "pytorch.rst#3": Block(_TORCH, standins=("no gpu",)),
    "pytorch.rst#4": Block("import pytorch_lightning as pl\n", standins=()),
    **{f"ray.rst#{number}": _RAY for number in range(1, 6)},
    **{f"spark.rst#{number}": _SPARK for number in range(1, 8)},
    "summary.rst#1": Block(_TENSORFLOW_1, standins=_V1),
    "summary.rst#2": Block(standins=(), flags="--mpi"),
    "summary.rst#3": Block(standins=(), ranks=4, flags="--mpi"),
    "tensorflow.rst#1": _PART,
    "tensorflow.rst#2": _PART,
    "tensorflow.rst#3": Block(_TENSORFLOW_1, standins=_V1),
    "tensorflow.rst#4": Block(_KERAS),
    "tensorflow.rst#5": Block(_SERVICE, _READ, standins=(), service=""),
    "tensorflow.rst#6": Block(
        _SERVICE, textwrap.indent(_READ, "    "), standins=(), service="--dispatcher-side training"
    ),
    "troubleshooting.rst#1": Block(why_not="It does not use Horovod."),
    "troubleshooting.rst#2": Block("import horovod.torch as hvd\nhvd.init()\n", standins=()),
    "xla.rst#1": Block(why_not="It is no valid Python: its second line is indented."),
}


def blocks_of(page: Path) -> Iterator[str]:
    """Yield the blocks of Python in a page of the documentation."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^( *)\.\. code-block:: python\n((?:\1 +.*\n|\s*\n)+)", text, re.MULTILINE):
        yield textwrap.dedent(re.sub(r"^ +:[\w-]+:.*\n", "", found[2])).strip() + "\n"


def program_of(text: str, block: Block, place: Path) -> str:
    """Return the program of a block that runs in the folder ``place``. Files in /tmp are there instead."""
    text = re.sub(r"^(\s*)(\w+) = \.\.\.$", r"\1\2 = made_\2", text, flags=re.MULTILINE)
    text = re.sub(r"^# on ranks (\d) and (\d)\n", r"if hvd.rank() in (\1, \2):\n    ", text, flags=re.MULTILINE)
    text = text.replace("batch_size=...", "batch_size=4").replace("'/tmp/", f"'{place}/")
    return f"{block.before}\n{text}\n{block.behind}"
