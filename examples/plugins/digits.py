"""Learns handwritten digits with numpy alone, using the plugins that it is given: `ddl run -np 2 python digits.py`.

`--compression int8` sends gradients as int8; `--backend zmq` and `--fusion-policy bysize` are options of `ddl run`.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import ddlcore as ddl

Array = Any  # np.ndarray, float32 unless a name says otherwise


def digits() -> tuple[Array, Array, Array, Array]:
    """Return 1500 training images and labels, and 297 test images and labels, the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def network() -> dict[str, Array]:
    random = np.random.default_rng(2)
    shapes = {"w1": (64, 96), "b1": (96,), "w2": (96, 10), "b2": (10,)}
    return {
        name: random.normal(0, shape[0] ** -0.5, shape).astype(np.float32) if len(shape) == 2 else np.zeros(shape, "f4")
        for name, shape in shapes.items()
    }


def gradients(net: dict[str, Array], images: Array, labels: Array) -> dict[str, Array]:
    hidden = np.maximum(images @ net["w1"] + net["b1"], 0)  # (rows, 96)
    scores = hidden @ net["w2"] + net["b2"]  # (rows, 10)
    chances = np.exp(scores - scores.max(1, keepdims=True))
    error = chances / chances.sum(1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    back = (error @ net["w2"].T) * (hidden > 0)
    found = {"w2": hidden.T @ error, "b2": error.sum(0), "w1": images.T @ back, "b1": back.sum(0)}
    return {name: np.ascontiguousarray(gradient, np.float32) for name, gradient in found.items()}


def train(compression: str = "none", epochs: int = 20) -> tuple[float, float]:
    """Train on the ranks of the job; return the test accuracy, and the encoded bytes for each byte of gradients."""
    rank, size = ddl.rank(), ddl.size()
    images, labels, test_images, test_labels = digits()
    images, labels = images[rank::size], labels[rank::size]
    rows = len(digits()[0]) // size // 32 * 32  # every rank takes as many steps
    net = network()
    speed = {name: np.zeros_like(value) for name, value in net.items()}
    for epoch in range(epochs):
        order = np.random.default_rng([epoch, rank]).permutation(len(labels))[:rows]
        for batch in order.reshape(-1, 32):
            local = gradients(net, images[batch], labels[batch])
            handles = {
                name: ddl.allreduce_async(gradient, name=name, op=ddl.Average, compression=compression)
                for name, gradient in local.items()
            }
            for name, handle in handles.items():
                speed[name] = 0.9 * speed[name] + handle.wait()
                net[name] -= 0.1 * speed[name]
    ddl.verify(net)  # every rank has the same network, to the last bit
    hidden = np.maximum(test_images @ net["w1"] + net["b1"], 0)
    accuracy = float(((hidden @ net["w2"] + net["b2"]).argmax(1) == test_labels).mean())
    stats = ddl.stats()
    return accuracy, stats["encoded_bytes"] / stats["bytes"]["allreduce"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compression", default="none", help="the name of a compressor")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    ddl.init()
    accuracy, share = train(args.compression, args.epochs)
    if ddl.rank() == 0:
        route = ddl.stats()["routes"][0]
        print(f"test accuracy {100 * accuracy:.1f} %; {share or 1:.3f} bytes travel for one; {route}")
    assert accuracy >= 0.95, "too few digits were recognised"


if __name__ == "__main__":
    main()
