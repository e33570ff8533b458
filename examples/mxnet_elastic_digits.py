"""Learns handwritten digits with Gluon, and goes on when ranks are lost: `ddl run -np N --min-np M`."""

import argparse
import hashlib
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
from ddl_mxnet import elastic
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

LEARN = 1500  # of 1797 images; the others are for tests


def digits() -> tuple[Any, Any]:
    """Return images (1797, 64) and labels, in a shuffled order that is the same on every rank."""
    pixels, classes = load_digits(return_X_y=True)
    order = np.random.RandomState(1).permutation(len(classes))
    return mx.nd.array(pixels[order] / 16), mx.nd.array(classes[order])


def network() -> gluon.HybridBlock:
    """Return the network; its input sizes are given, because a rank that joins needs parameters at once."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(64, activation="relu", in_units=64), gluon.nn.Dense(10, in_units=64))
    return net


def digest(net: gluon.Block) -> str:
    """Return a digest that is equal on two ranks if their parameters are equal to the last bit."""
    seen = hashlib.sha256()
    for parameter in net.collect_params().values():
        seen.update(parameter.data().asnumpy().tobytes())
    return seen.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one rank")
    args = parser.parse_args()

    ddl.init()
    mx.random.seed(1)
    images, labels = digits()
    net = network()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = ddl.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": args.lr})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    sampler = elastic.ElasticSampler(range(LEARN))
    state = elastic.MXNetState(net, trainer, sampler=sampler)

    @elastic.run
    def train(state: elastic.MXNetState) -> None:
        """Go on from ``state``; called again whenever ranks were lost or have joined."""
        trainer.set_learning_rate(args.lr * ddl.size())
        print(f"rank {ddl.rank()} of {ddl.size()} begins at step {state.steps}", flush=True)
        while sampler.epoch < args.epochs:
            for number, chosen in enumerate(gluon.data.BatchSampler(sampler, args.batch, "keep")):
                with autograd.record():
                    loss = loss_of(net(images[chosen]), labels[chosen])
                loss.backward()
                trainer.step(len(chosen))
                sampler.record_batch(number, len(chosen))
                state.commit()
            sampler.set_epoch(sampler.epoch + 1)
            if ddl.rank() == 0:
                print(f"epoch {sampler.epoch}: loss {loss.mean().asscalar():.4f}", flush=True)

    train(state)
    accuracy = (net(images[LEARN:]).argmax(axis=1) == labels[LEARN:]).mean().asscalar()
    if ddl.rank() == 0:
        print(f"test accuracy {100 * accuracy:.1f} %")
    print(f"rank {ddl.rank()} of {ddl.size()}: parameters {digest(net)}", flush=True)


if __name__ == "__main__":
    main()
