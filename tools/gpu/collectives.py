"""One rank that calls all collectives on its device and compares with float64 in numpy; started alone or by ddl run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import ddl_torch as ddl
import numpy as np
import torch

from tools.gpu.rows import Row, check, tell

__all__ = ["main"]

COUNTS = (1, 1000, 70_001)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
Array = Any


def _input(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    values = np.random.default_rng(1000 * rank + count).integers(0, 5, count)
    return torch.from_numpy(values).to(dtype)


def _same(what: str, actual: torch.Tensor, expected: Array, device: str) -> None:
    if actual.device.type != device:
        raise AssertionError(f"{what} came back on {actual.device}, not on {device}")
    got = actual.to("cpu", torch.float64).numpy()
    if not np.allclose(got, expected, rtol=1e-2, atol=1e-3):
        raise AssertionError(f"{what} is wrong: {got[:4]} for {expected[:4]}")


def _collectives(device: str) -> None:
    rank, size = ddl.rank(), ddl.size()
    for dtype in TYPES:
        for count in COUNTS:
            inputs = [_input(each, count, dtype) for each in range(size)]
            wide = [each.to(torch.float64).numpy() for each in inputs]
            mine = inputs[rank].to(device)
            name = f"{dtype} of {count}"
            _same(f"sum, {name}", ddl.allreduce(mine, op=ddl.Sum), sum(wide), device)
            _same(f"max, {name}", ddl.allreduce(mine, op=ddl.Max), np.maximum.reduce(wide), device)
            _same(f"broadcast, {name}", ddl.broadcast(mine, root_rank=size - 1), wide[-1], device)
            _same(f"allgather, {name}", ddl.allgather(mine), np.concatenate(wide), device)
    grouped = [torch.full((n,), float(rank + 1), device=device) for n in (3, 5, 4096)]
    for result in ddl.grouped_allreduce(grouped, op=ddl.Average):
        _same("average of a group", result, np.full(result.numel(), (size + 1) / 2), device)
    rows = torch.arange(2 * size, dtype=torch.float32, device=device).reshape(size, 2) + 100 * rank
    got = ddl.alltoall(rows)
    got = got[0] if isinstance(got, tuple) else got
    expected = np.concatenate([[100 * s + 2 * rank, 100 * s + 2 * rank + 1] for s in range(size)])
    _same("alltoall", got.reshape(-1), expected, device)
    scattered = ddl.reducescatter(rows, op=ddl.Sum)
    total = size * np.arange(2 * size).reshape(size, 2) + 100 * sum(range(size))
    _same("reducescatter", scattered.reshape(-1), total[rank], device)


def _rows(asked: argparse.Namespace) -> Iterator[Row]:
    fault = ""
    try:
        ddl.init()
        _collectives(asked.device)
        routes = str(ddl.stats().get("routes", ""))
        if asked.route and asked.route not in routes:
            fault = f"went another way than {asked.route}: {routes}"
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault or ddl.rank() == 0:
        yield check(asked.what, "as numpy in float64", fault, asked.stand_in)
    ddl.shutdown()


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--what", default="collectives")
    parser.add_argument("--route", default="", help="what the routes in stats() must name")
    parser.add_argument("--stand-in", default="")
    tell(_rows(parser.parse_args()))


if __name__ == "__main__":
    main()
