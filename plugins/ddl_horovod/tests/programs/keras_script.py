"""A script as Horovod's documentation has it for Keras. Not a line of it is ddl's."""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
x = np.random.default_rng(hvd.rank()).random((640, 1)).astype("float32")
model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1, use_bias=False)])
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05 * hvd.size()), backward_passes_per_step=1)
model.compile(loss="mse", optimizer=optimizer)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.05 * hvd.size(), warmup_epochs=2, verbose=0),
]
model.fit(x, 3 * x, batch_size=32, epochs=8, callbacks=callbacks, verbose=0)
slope = float(model.get_weights()[0].item())
assert np.allclose(hvd.allgather(np.array([slope])), slope), "the ranks have different weights"
if hvd.rank() == 0:
    print("learned" if abs(slope - 3) < 0.1 else f"slope {slope}")
