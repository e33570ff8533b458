"""Communicators whose ranks are threads of the test, and random collectives with their right answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ddl_conform.ranks import Ranks
from ddl_conform.store import ThreadStore

from ddlcore.contracts.transport import Context, Plan, Transport
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.types import Buffer, DType, Member
from tests.kernels.reference import OPS, Array, native, numbers, reduced, same

__all__ = ["World", "buffer", "random_bucket", "random_collectives"]

Body = Callable[[Transport, int], Any]


def buffer(array: Array) -> Buffer:
    return Buffer(array.ctypes.data, array.size, DType.of(array.dtype.name), array.shape, owner=array)


class World:
    """``size`` ranks of one communicator, each a thread with a transport of its own."""

    def __init__(self, kind: Callable[[], Transport], size: int, deadline_s: float = 40.0) -> None:
        self.transports = [kind() for _ in range(size)]
        self.store = ThreadStore()
        self.size = size
        self.deadline_s = deadline_s
        self._ranks = Ranks(size)

    def __enter__(self) -> World:
        members = tuple(Member(rank, 0) for rank in range(self.size))
        kernels = CpuKernels()

        def opened(rank: int) -> None:
            self.transports[rank].open(Context(rank, members, self.store, kernels, {}, self.deadline_s, "world"))

        self._ranks.run(opened, self.deadline_s)
        return self

    def __exit__(self, *error: object) -> None:
        for transport in self.transports:
            if self._ranks.stuck:
                break
            transport.close()
        self._ranks.close()

    def run(self, body: Body) -> list[Any]:
        """``body(transport, rank)`` on every rank at once."""
        return self._ranks.run(lambda rank: body(self.transports[rank], rank), self.deadline_s, self.abort)

    def abort(self) -> None:
        for transport in self.transports:
            transport.abort()


def random_bucket(random: np.random.Generator, size: int, most: int) -> Body:
    """A vectored allreduce: some tensors, empty ones too, in place or not, some op and scales."""
    dtype, op = DType(random.integers(len(DType))), OPS[random.integers(len(OPS))]
    counts = [int(c) for c in random.integers(0, most, random.integers(1, 6))]
    counts[0] *= int(random.integers(0, 2))
    plain = not dtype.is_float or random.random() < 0.5
    prescale, scale = (1.0, 1.0) if plain else (0.5, 0.3)
    in_place = bool(random.integers(0, 2))
    seed = int(random.integers(1 << 30))
    inputs = [[numbers(dtype, count, seed + 100 * i + r) for i, count in enumerate(counts)] for r in range(size)]
    expected = [reduced([row[i] for row in inputs], dtype, op, prescale, scale) for i in range(len(counts))]

    def body(transport: Transport, rank: int) -> None:
        sources = [x.copy() for x in inputs[rank]]
        targets = sources if in_place else [np.empty_like(x) for x in sources]
        prepared = transport.prepare(Plan(tuple(counts), dtype, op, prescale, scale))
        prepared.start([x.ctypes.data for x in sources], [x.ctypes.data for x in targets])
        for target, right in zip(targets, expected):
            same(target, right)

    return body


def _gather(random: np.random.Generator, size: int, most: int) -> Body:
    counts = [int(c) for c in random.integers(0, most, size)]
    counts[random.integers(size)] = 0

    def body(transport: Transport, rank: int) -> None:
        source = np.full(counts[rank], rank, np.int16)
        target = np.empty(sum(counts), np.int16)
        transport.allgatherv(buffer(source), buffer(target), counts)
        assert (target == np.repeat(np.arange(size), counts)).all()

    return body


def _alltoall(random: np.random.Generator, size: int, most: int) -> Body:
    counts = random.integers(0, 1 + most // size, (size, size))
    counts[random.integers(size)] = 0
    table = counts.tolist()

    def body(transport: Transport, rank: int) -> None:
        source = np.repeat(1000 * rank + np.arange(size), table[rank]).astype(np.int32)
        column = [row[rank] for row in table]
        target = np.empty(sum(column), np.int32)
        transport.alltoallv(buffer(source), buffer(target), table)
        assert (target == np.repeat(1000 * np.arange(size) + rank, column)).all()

    return body


def _reducescatter(random: np.random.Generator, size: int, most: int) -> Body:
    dtype, op = DType(random.integers(len(DType))), OPS[random.integers(len(OPS))]
    counts = [int(c) for c in random.integers(0, 1 + most // size, size)]
    seed = int(random.integers(1 << 30))
    inputs = [numbers(dtype, sum(counts), seed + r) for r in range(size)]
    whole = reduced(inputs, dtype, op)

    def body(transport: Transport, rank: int) -> None:
        source, target = inputs[rank].copy(), np.empty(counts[rank], native(dtype))
        transport.reducescatterv(buffer(source), buffer(target), counts, op)
        begin = sum(counts[:rank])
        same(target, whole[begin : begin + counts[rank]])

    return body


def _broadcast(random: np.random.Generator, size: int, most: int) -> Body:
    root, count = int(random.integers(size)), int(random.integers(0, most))

    def body(transport: Transport, rank: int) -> None:
        values = np.full(count, rank, np.float64)
        transport.broadcast(buffer(values), root)
        assert (values == root).all()

    return body


def _barrier(random: np.random.Generator, size: int, most: int) -> Body:
    def body(transport: Transport, rank: int) -> None:
        transport.barrier()

    return body


def random_collectives(seed: int, size: int, length: int, most: int) -> Body:
    """A program of ``length`` collectives on up to ``most`` elements, the same on every rank, that checks itself."""
    random = np.random.default_rng(seed)
    kinds = (random_bucket, random_bucket, _gather, _alltoall, _reducescatter, _broadcast, _barrier)
    steps = [kinds[random.integers(len(kinds))](random, size, most) for _ in range(length)]

    def program(transport: Transport, rank: int) -> None:
        for step in steps:
            step(transport, rank)

    return program
