"""Runs fifty replayed steps of the digits example, and prints what they sent by ddl's count and by the kernel's."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

import ddl_torch as ddl
import torch
from torch import nn

STEPS = 50
RECEIVED_AT, SENT_AT = 128, 200  # tcpi_bytes_received, tcpi_bytes_sent in struct tcp_info (Linux 4.19 and later)


def traffic() -> dict[str, tuple[int, int]]:
    """Return the bytes sent and received of each TCP connection of this process, as the kernel counts them."""
    counts = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            name = os.readlink(path)
            copy = os.dup(int(path.name))
        except OSError:  # it is closed again: the descriptor of the listing itself
            continue
        if not name.startswith("socket:"):
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                (received,), (sent,) = (
                    struct.unpack_from("=Q", info, RECEIVED_AT),
                    struct.unpack_from("=Q", info, SENT_AT),
                )
                counts[name] = (sent, received)
    return counts


def main(example: str) -> None:
    spec = importlib.util.spec_from_file_location("torch_digits", example)
    assert spec is not None and spec.loader is not None
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)

    ddl.init()
    torch.manual_seed(1)
    learn, _, _ = digits.digits()
    model = digits.network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    optimizer = ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ddl.broadcast_parameters(model.state_dict(), root_rank=0)
    images, labels = learn.tensors
    own = torch.arange(ddl.rank(), len(labels), ddl.size()).split(32)

    def step(number: int) -> None:
        rows = own[number % len(own)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()

    for number in range(20):
        step(number)
    before, wires, begun_s = ddl.stats(), traffic(), time.monotonic()
    for number in range(STEPS):
        step(number)
    after, wires_after, seconds = ddl.stats(), traffic(), time.monotonic() - begun_s
    found = {
        "seconds": seconds,
        "messages": after["control_messages"] - before["control_messages"],
        "replayed": after["buckets_replayed"] - before["buckets_replayed"],
        "negotiated": after["buckets_negotiated"] - before["buckets_negotiated"],
        "wires": [
            [wires_after[name][way] - wires[name][way] for way in (0, 1)]
            for name in sorted(wires.keys() & wires_after.keys())
        ],
    }
    print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
