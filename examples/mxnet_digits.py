"""Learns handwritten digits (scikit-learn's, real data) with Gluon, on every rank that `ddl run -np N` starts."""

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

LEARN = 1500  # of 1797 images; the others are for tests


def digits() -> tuple[Any, Any]:
    """Return images (1797, 1, 8, 8) and labels, in a shuffled order that is the same on every rank."""
    pixels, classes = load_digits(return_X_y=True)
    order = np.random.RandomState(1).permutation(len(classes))
    images = pixels[order].reshape(-1, 1, 8, 8).astype(np.float32) / 16
    return mx.nd.array(images), mx.nd.array(classes[order])


def network() -> gluon.HybridBlock:
    """Return the network; its layers learn their input sizes in the first forward pass."""
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 3, padding=1, activation="relu"),  # (rows, 16, 8, 8)
        gluon.nn.Conv2D(32, 3, padding=1, activation="relu"),
        gluon.nn.MaxPool2D(2),  # (rows, 32, 4, 4)
        gluon.nn.Dense(10),
    )
    return net


def batches(epoch: int, size: int) -> Iterator[Any]:
    """Yield the indices of this rank's images, ``size`` at a time; every rank has as many batches."""
    order = np.random.RandomState(epoch).permutation(LEARN)
    mine = np.resize(order, -(-LEARN // ddl.size()) * ddl.size())[ddl.rank() :: ddl.size()]
    for start in range(0, len(mine), size):
        yield mine[start : start + size]


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
    parser.add_argument("--checkpoint", type=Path, help="folder to keep the state in, after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()

    ddl.init()
    first = ddl.rank() == 0
    mx.random.seed(1)
    images, labels = digits()
    net = network()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    if args.resume:
        net.load_parameters(str(args.checkpoint / "net.params"))
    lr = args.lr * ddl.size()
    trainer = ddl.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": lr})
    begin = 0
    if args.resume:
        trainer.load_states(str(args.checkpoint / "trainer.states"))
        trainer.set_learning_rate(lr)  # the checkpoint may come from another number of ranks
        begin = int((args.checkpoint / "epoch").read_text())
    ddl.broadcast_parameters(net.collect_params(), root_rank=0)

    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(begin, args.epochs):
        for chosen in batches(epoch, args.batch):
            with autograd.record():
                loss = loss_of(net(images[chosen]), labels[chosen])
            loss.backward()
            trainer.step(len(chosen))
        if first:
            print(f"epoch {epoch + 1}: loss {loss.mean().asscalar():.4f}", flush=True)
            if args.checkpoint:
                args.checkpoint.mkdir(exist_ok=True)
                net.save_parameters(str(args.checkpoint / "net.params"))
                trainer.save_states(str(args.checkpoint / "trainer.states"))
                (args.checkpoint / "epoch").write_text(str(epoch + 1))

    accuracy = (net(images[LEARN:]).argmax(axis=1) == labels[LEARN:]).mean().asscalar()
    if first:
        print(f"test accuracy {100 * accuracy:.1f} %")
    print(f"rank {ddl.rank()} of {ddl.size()}: parameters {digest(net)}", flush=True)


if __name__ == "__main__":
    main()
