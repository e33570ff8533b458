"""Trains a small network for some steps with a fault:

``last`` flips a bit before the last step, ``forgotten`` omits the broadcast.
"""

from __future__ import annotations

import sys

import ddl_torch as ddl
import torch
from torch import nn

STEPS = 10


def main(planted: str) -> None:
    ddl.init()
    torch.manual_seed(ddl.rank() if planted == "forgotten" else 0)
    model, other = nn.Linear(6, 2), nn.Linear(6, 2, dtype=torch.float64)
    bare = torch.optim.Adam(other.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    if planted == "last":
        ddl.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(ddl.rank())
    for step in range(STEPS):
        if planted == "last" and step == STEPS - 1 and ddl.rank() == 1:
            model.bias.data.view(torch.int32)[1] ^= 1 << 22
        for each, of in ((optimizer, model), (bare, other)):
            each.zero_grad()
            of(torch.randn(4, 6, dtype=of.weight.dtype)).square().mean().backward()
            each.step()
    print("trained to the end", flush=True)


main(sys.argv[1])
