"""A script as Horovod's documentation has it for MXNet's Gluon. Not a line of it is ddl's."""

import horovod.mxnet as hvd
import mxnet as mx
from mxnet import autograd, gluon

hvd.init()
mx.random.seed(hvd.rank())
model = gluon.nn.Dense(1, in_units=1, use_bias=False)
model.initialize(mx.init.Uniform())
parameters = model.collect_params()
hvd.broadcast_parameters(parameters, root_rank=0)
trainer = hvd.DistributedTrainer(parameters, mx.optimizer.create("sgd", learning_rate=0.1 * hvd.size()))
loss_of = gluon.loss.L2Loss()
for _ in range(100):
    x = mx.nd.random.uniform(shape=(32, 1))
    with autograd.record():
        loss = loss_of(model(x), 3 * x)
    loss.backward()
    trainer.step(32)
slope = model.weight.data().asscalar()
gathered = hvd.allgather(model.weight.data(), name="slope").asnumpy()
assert (gathered == slope).all(), "the ranks have different weights"
if hvd.rank() == 0:
    print("learned" if abs(slope - 3) < 0.1 else f"slope {slope}")
