"""Learns handwritten digits (scikit-learn's, real data) with MXNet's Module on every rank of `ddl run -np N`."""

import argparse
import hashlib
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
from sklearn.datasets import load_digits

LEARN = 1500  # of 1797 images; the others are for tests


def digits() -> tuple[Any, Any]:
    """Return images (1797, 1, 8, 8) and labels, in a shuffled order that is the same on every rank."""
    pixels, classes = load_digits(return_X_y=True)
    order = np.random.RandomState(1).permutation(len(classes))
    return pixels[order].reshape(-1, 1, 8, 8).astype(np.float32) / 16, classes[order].astype(np.float32)


def network() -> mx.sym.Symbol:
    x = mx.sym.Variable("data")
    x = mx.sym.Activation(mx.sym.Convolution(x, num_filter=16, kernel=(3, 3), pad=(1, 1)), act_type="relu")
    x = mx.sym.Activation(mx.sym.Convolution(x, num_filter=32, kernel=(3, 3), pad=(1, 1)), act_type="relu")
    x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max")  # (rows, 32, 4, 4)
    x = mx.sym.FullyConnected(mx.sym.flatten(x), num_hidden=10)
    return mx.sym.SoftmaxOutput(x, name="softmax")


def own_part(images: Any, labels: Any, epoch: int, batch: int) -> mx.io.NDArrayIter:
    """Return this rank's images of an epoch; every rank has as many."""
    order = np.random.RandomState(epoch).permutation(LEARN)
    mine = np.resize(order, -(-LEARN // ddl.size()) * ddl.size())[ddl.rank() :: ddl.size()]
    return mx.io.NDArrayIter(images[mine], labels[mine], batch)


def digest(arg_params: dict[str, Any]) -> str:
    """Return a digest that is equal on two ranks if their parameters are equal to the last bit."""
    seen = hashlib.sha256()
    for name in sorted(arg_params):
        seen.update(arg_params[name].asnumpy().tobytes())
    return seen.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one rank")
    parser.add_argument("--checkpoint", help="what the names of the files begin with, after every epoch")
    parser.add_argument(
        "--resume", type=int, default=0, metavar="EPOCH", help="go on from the checkpoint of that epoch"
    )
    args = parser.parse_args()

    ddl.init()
    first = ddl.rank() == 0
    mx.random.seed(1)
    images, labels = digits()
    module = mx.mod.Module.load(args.checkpoint, args.resume) if args.resume else mx.mod.Module(network())
    module.bind([("data", (args.batch, 1, 8, 8))], [("softmax_label", (args.batch,))])
    if not args.resume:
        module.init_params(mx.init.Xavier())
    arg_params, aux_params = module.get_params()
    ddl.broadcast_parameters(arg_params, root_rank=0)
    ddl.broadcast_parameters(aux_params, root_rank=0)
    module.set_params(arg_params, aux_params)
    optimizer = mx.optimizer.create(
        "sgd", learning_rate=args.lr * ddl.size(), momentum=0.9, rescale_grad=1 / args.batch
    )
    optimizer = ddl.DistributedOptimizer(optimizer)
    module.init_optimizer(kvstore=None, optimizer=optimizer)
    if args.resume:
        module.load_optimizer_states(f"{args.checkpoint}-{args.resume:04d}.states")

    loss = mx.metric.CrossEntropy()
    for epoch in range(args.resume, args.epochs):
        loss.reset()
        for batch in own_part(images, labels, epoch, args.batch):
            module.forward_backward(batch)
            module.update()
            module.update_metric(loss, batch.label)
        if first:
            print(f"epoch {epoch + 1}: loss {loss.get()[1]:.4f}", flush=True)
            if args.checkpoint:
                module.save_checkpoint(args.checkpoint, epoch + 1, save_optimizer_states=True)

    test = mx.io.NDArrayIter(images[LEARN:], labels[LEARN:], args.batch)
    accuracy = dict(module.score(test, "acc"))["accuracy"]
    if first:
        print(f"test accuracy {100 * accuracy:.1f} %")
    print(f"rank {ddl.rank()} of {ddl.size()}: parameters {digest(module.get_params()[0])}", flush=True)


if __name__ == "__main__":
    main()
