"""Learns handwritten digits with JAX on the CPU: `ddl run -np 2 python jax_digits.py`."""

from __future__ import annotations

from typing import Any

import ddl_jax as ddl
import jax
import jax.numpy as jnp
import numpy as np
from digits import digits, network

Net = dict[str, Any]


def loss(net: Net, images: Any, labels: Any) -> Any:
    hidden = jax.nn.relu(images @ net["w1"] + net["b1"])
    chances = jax.nn.log_softmax(hidden @ net["w2"] + net["b2"])
    return -chances[jnp.arange(len(labels)), labels].mean()


def main() -> None:
    ddl.init()
    rank, size = ddl.rank(), ddl.size()
    images, labels, test_images, test_labels = digits()
    rows = len(images) // size // 32 * 32
    images, labels = images[rank::size], labels[rank::size]
    net: Net = {name: jnp.asarray(value) for name, value in network().items()}
    speed: Net = {name: jnp.zeros_like(value) for name, value in net.items()}
    gradients = jax.jit(jax.grad(loss))
    for epoch in range(20):
        order = np.random.default_rng([epoch, rank]).permutation(len(labels))[:rows]
        for batch in order.reshape(-1, 32):
            local = gradients(net, images[batch], labels[batch])
            handles = {name: ddl.allreduce_async(gradient, name=name) for name, gradient in local.items()}
            speed = {name: 0.9 * speed[name] + handle.wait() for name, handle in handles.items()}
            net = {name: value - 0.1 * speed[name] for name, value in net.items()}
    hidden = jax.nn.relu(test_images @ net["w1"] + net["b1"])
    accuracy = float((jnp.argmax(hidden @ net["w2"] + net["b2"], 1) == test_labels).mean())
    if rank == 0:
        print(f"test accuracy {100 * accuracy:.1f} %")
    assert accuracy >= 0.95, "too few digits were recognised"
    ddl.shutdown()


if __name__ == "__main__":
    main()
