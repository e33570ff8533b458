"""Learns digits in a loop that keeps changing, so that ranks leave its schedule and learn a new one: `ddl run -np 3`.

A step's gradients are reduced as in any loop. But the first layer is frozen at step 30 and trained again from step 55,
the last batch of an epoch is shorter, every 7th step reduces a metric, every 10th step evaluates, and the last rank
runs out of data early. With `DDL_REPLAY=0` the parameters are the same to the last bit.
"""

import argparse
import hashlib

import ddl_torch as ddl
import torch
from sklearn.datasets import load_digits
from torch import nn

Split = tuple[torch.Tensor, torch.Tensor]  # (rows, 64) pixels, (rows,) classes


def digits() -> tuple[Split, Split]:
    """Return this rank's part of 1500 training images and of 297 test images."""
    pixels, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(classes)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    learn, test = order[:1500][ddl.rank() :: ddl.size()], order[1500:][ddl.rank() :: ddl.size()]
    return (images[learn], labels[learn]), (images[test], labels[test])


def evaluate(model: nn.Module, test: Split) -> float:
    """Return the share of all ranks' test images that are recognized; uses one allreduce for each batch."""
    right = rows = 0.0
    for images, labels in zip(*(part.split(20) for part in test), strict=True):
        with torch.no_grad():
            counts = torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
        counts = ddl.allreduce(counts, op=ddl.Sum, name="evaluate.counts")
        right, rows = right + counts[0].item(), rows + counts[1].item()
    return right / rows


def digest(model: nn.Module) -> str:
    """Return a digest that is equal on two ranks if their parameters are equal to the last bit."""
    seen = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        seen.update(parameter.detach().numpy().tobytes())
    return seen.hexdigest()


def show(stats: ddl.Stats) -> None:
    """Print a table of what this rank has counted: messages, batches, bytes, seconds."""
    for key, value in stats.items():
        parts = {f"{key}.{part}": one for part, one in value.items()} if isinstance(value, dict) else {key: value}
        for name, one in parts.items():
            text = f"{one:.3f}" if isinstance(one, float) else str(one)
            print(f"  {name:20}  {text:>9}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--early", type=int, default=8, help="how many steps before the others the last rank ends")
    args = parser.parse_args()

    ddl.init()
    torch.manual_seed(1)
    first, last = ddl.rank() == 0, ddl.rank() == ddl.size() - 1
    (images, labels), test = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ddl.broadcast_parameters(model.state_dict(), root_rank=0)

    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(ddl.rank()))
    batches = order.split(32)  # the last one has 20 rows
    for step in range(1, args.steps - (args.early if last else 0) + 1):
        if step in (30, 55):
            model[0].requires_grad_(step == 55)  # its gradients stop at step 30 and come again from step 55
        rows = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        if step % 7 == 0:
            mean = ddl.allreduce(loss.detach(), name="metric.loss")
        if step % 10 == 0:
            accuracy = evaluate(model, test)
            if first:
                print(
                    f"step {step}: loss {mean.item():.4f} (of step {step - step % 7}), accuracy {100 * accuracy:.1f} %"
                )

    latest = ddl.join()  # a rank without data takes part with zeros until all ranks have joined
    ddl.broadcast_parameters(model.state_dict(), root_rank=latest)
    stats = ddl.stats()
    left = stats["divergences"]
    print(f"rank {ddl.rank()} of {ddl.size()}: parameters {digest(model)}, left replay {left} times", flush=True)
    if first:
        show(stats)


if __name__ == "__main__":
    main()
