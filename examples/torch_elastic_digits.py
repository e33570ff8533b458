"""Learns handwritten digits on ranks that may be lost, and on others that join: `ddl run -np 4 --min-np 2 …`."""

import argparse
import hashlib

import ddl_torch as ddl
import torch
from ddl_torch import elastic
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Return 1500 training images with labels, 297 test images and their labels."""
    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(classes)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:1500], labels[:1500]), images[1500:], labels[1500:]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),  # (rows, 16, 8, 8)
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),  # (rows, 16, 4, 4)
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def digest(model: nn.Module) -> str:
    """Return a digest that is equal on two ranks if their parameters are equal to the last bit."""
    seen = hashlib.sha256()
    for parameter in model.parameters():
        seen.update(parameter.detach().numpy().tobytes())
    return seen.hexdigest()[:12]


@elastic.run
def train(state: elastic.TorchState, learn: TensorDataset, epochs: int, batch: int) -> None:
    """Go on from ``state``, which is the same on all ranks. A rank that is lost ends this call, and it is called again."""
    sampler = state.sampler
    loader = DataLoader(learn, batch, sampler=sampler)
    while sampler.epoch < epochs:
        for number, (images, labels) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(state.model(images), labels)
            loss.backward()
            state.optimizer.step()
            sampler.record_batch(number, batch)
            state.commit()  # here other ranks may join
        sampler.set_epoch(sampler.epoch + 1)
        if ddl.rank() == 0:
            print(f"epoch {sampler.epoch}: loss {loss.item():.4f}, {ddl.size()} ranks, step {state.steps}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one rank")
    args = parser.parse_args()

    ddl.init()
    torch.manual_seed(1)
    learn, test_images, test_labels = digits()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * ddl.size())
    optimizer = ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = elastic.TorchState(model, optimizer, sampler=elastic.ElasticSampler(learn))

    def scale(old: int, new: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= new / old

    state.register_reset_callbacks([scale])
    train(state, learn, args.epochs, args.batch)

    model.eval()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if ddl.rank() == 0:
        print(f"test accuracy {100 * accuracy:.1f} %")
    print(f"rank {ddl.rank()} of {ddl.size()}: parameters {digest(model)}", flush=True)


if __name__ == "__main__":
    main()
