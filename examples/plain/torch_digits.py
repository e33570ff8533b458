"""Learns handwritten digits (scikit-learn's, real data) in one process."""

import argparse
import hashlib
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


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
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),  # (rows, 32, 4, 4)
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def digest(model: nn.Module) -> str:
    """Return a digest that is equal on two ranks if their parameters are equal to the last bit."""
    seen = hashlib.sha256()
    for parameter in model.parameters():
        seen.update(parameter.detach().numpy().tobytes())
    return seen.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one rank")
    parser.add_argument("--checkpoint", type=Path, help="file to keep the state in, after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()

    first = True
    torch.manual_seed(1)
    learn, test_images, test_labels = digits()
    model = network()
    lr = args.lr
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    begin = 0
    if args.resume:
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0]["lr"] = lr  # the checkpoint may come from another number of ranks
        begin = state["epoch"]

    sampler = RandomSampler(learn)
    loader = DataLoader(learn, args.batch, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(begin, args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if first:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
            if args.checkpoint:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                torch.save(state, args.checkpoint)

    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if first:
        print(f"test accuracy {100 * accuracy:.1f} %")
    print(f"parameters {digest(model)}", flush=True)


if __name__ == "__main__":
    main()
