"""Tests of atomic buckets.

An atomic bucket either runs with real data of all ranks, or, if a rank has no real data, changes no memory on any rank.
In the second case the bucket is called void.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from ddl_conform import oracle
from ddl_conform.group import Area, finish
from ddl_conform.transport_base import TransportBase, only_where
from ddlcore.contracts.transport import Plan, Prepared, Transport
from ddlcore.types import DType, ReduceOp

__all__ = ["TransportEntry"]

FEW, MANY = "few", "many"  # amounts of data: less than a chunk, and several chunks


class _Bucket:
    """The tensors of one rank for one run of a plan in place, and the sums that the tensors contain after the run."""

    def __init__(self, plan: Plan, rank: int, size: int, seed: int) -> None:
        self.areas, self.sums, self.before = [], [], []
        for i, count in enumerate(plan.counts):
            sources = [oracle.values(plan.dtype, count, r, seed=seed + i) for r in range(size)]
            self.areas.append(Area(sources[rank], offset=i % 3))
            self.sums.append(oracle.reduce(sources, plan.op))
            self.before.append(sources[rank])
        self.addresses = [area.buffer.address for area in self.areas]

    def fault(self, real: bool) -> str:
        """Return a text that describes the first wrong tensor; "" if all tensors are right.

        If ``real`` is true, the tensors must contain the sums. If ``real`` is false, they must contain the values from
        before the run.
        """
        for area, wanted in zip(self.areas, self.sums if real else self.before):
            if area.damage() or area.array.tobytes() != np.ascontiguousarray(wanted).tobytes():
                return area.damage() or ("a sum is wrong" if real else "a void bucket was written to")
        return ""


class TransportEntry(TransportBase):
    """The tests of atomic buckets, for transports whose capabilities include ``atomic``."""

    def entry_plan(self, length: str) -> Plan:
        """Return a plan for integer tensors, whose sums do not depend on the order of addition.

        ``length`` is FEW (less than a chunk of data) or MANY (several chunks). If the transport cannot run a bucket
        atomically, the test is skipped.
        """
        if not self.capabilities().atomic:
            pytest.skip("capabilities: buckets cannot run atomically")
        one = self.chunk_bytes // 4
        return Plan((3, 0, 200) if length == FEW else (5, 2 * one + 7, 0, one), DType.I32, ReduceOp.Sum)

    @only_where("atomic")
    @pytest.mark.parametrize("length", [FEW, MANY])
    def test_bound_memory_is_entered_again(self, length: str) -> None:
        """After ``bind``, each ``run_bound`` uses the values that the bound memory contains at the time of the run.

        Other addresses can be bound later. ``run_atomic`` also works with addresses that are only partly the same as
        the bound addresses.
        """
        plan = self.entry_plan(length)
        for size in self.sizes:
            faults: list[str] = []

            def play(rank: int, transport: Transport, size: int = size, faults: list[str] = faults) -> None:
                prepared = transport.prepare(plan)
                kept = []  # kept alive: a transport that uses old addresses shall give wrong values, not crash
                for seed in (0, 10, 20):
                    bucket = _Bucket(plan, rank, size, seed)
                    kept.append((bucket, list(bucket.areas)))
                    prepared.bind(bucket.addresses, bucket.addresses)
                    for _ in range(3):
                        for area, values in zip(bucket.areas, bucket.before):
                            area.array[:] = values
                        complete = prepared.run_bound(True)
                        faults.append(bucket.fault(True) if complete else "a bucket of real data was void")
                other = _Bucket(plan, rank, size, 30)
                other.addresses[0] = bucket.addresses[0]  # all other tensors stay where ``other`` has them
                bucket.areas[0].array[:] = other.before[0]
                other.areas[0] = bucket.areas[0]
                faults.append("" if prepared.run_atomic(other.addresses, other.addresses, True) else "void")
                faults.append(other.fault(True))

            self.play(size, play)
            assert not any(faults), next(fault for fault in faults if fault)

    @only_where("atomic")
    @pytest.mark.parametrize("length", [FEW, MANY])
    def test_a_dummy_makes_a_bucket_void(self, length: str) -> None:
        """If at least one rank has no real data, ``run_atomic`` returns False on every rank, and no memory changes."""
        plan = self.entry_plan(length)
        for size in self.sizes:
            absent = [{rank} for rank in range(size)] + [set(range(size)), set(range(size - 1))]
            self._play_entries(size, plan, [ranks for one in absent for ranks in (one, set())])

    @only_where("atomic")
    def test_entries_between_other_collectives(self) -> None:
        """Atomic buckets, void ones and complete ones, can alternate with barriers and broadcasts."""
        plans = [self.entry_plan(FEW), self.entry_plan(MANY)]
        for size in self.sizes:
            for seed in range(3):
                draw = random.Random(seed)
                absent = [{r for r in range(size) if draw.random() < 0.2} for _ in range(30)]
                self._play_entries(size, plans[seed % 2], absent, others=draw)

    def _play_entries(self, size: int, plan: Plan, absent: list[set[int]], others: random.Random | None = None) -> None:
        """Run one bucket for each element of ``absent``, and check the results.

        An element of ``absent`` is the set of the ranks that have no real data for the bucket. After each bucket, a
        barrier, some broadcasts or nothing follows: ``others`` chooses at random. If ``others`` is None, nothing
        follows.
        """
        faults: list[str] = []
        between = [others.choice(("barrier", "broadcast", "nothing")) if others else "nothing" for _ in absent]

        def enter(prepared: Prepared, rank: int, number: int, missing: set[int]) -> None:
            bucket = _Bucket(plan, rank, size, seed=number)
            addresses = bucket.addresses if rank not in missing else []
            complete = prepared.run_atomic(addresses, addresses, rank not in missing)
            if complete is bool(missing):
                faults.append(f"rank {rank} was told {complete} with {len(missing)} ranks without data")
            faults.append(bucket.fault(complete))

        def play(rank: int, transport: Transport) -> None:
            prepared = transport.prepare(plan)
            for number, (missing, other) in enumerate(zip(absent, between)):
                enter(prepared, rank, number, missing)
                if other == "barrier":
                    finish(transport.barrier())
                for _ in range(20 if other == "broadcast" else 0):
                    finish(transport.broadcast(Area(np.zeros(3, np.int32)).buffer, number % size))

        self.play(size, play)
        assert not any(faults), next(fault for fault in faults if fault)
