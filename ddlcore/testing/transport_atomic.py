"""Tests of atomic buckets: a bucket runs with real data of all ranks, or changes nothing on any rank."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ddlcore.contracts.transport import Plan, Prepared, Transport
from ddlcore.testing import oracle
from ddlcore.testing.group import Area, finish
from ddlcore.testing.transport_base import TransportBase, only_where
from ddlcore.types import DType, ReduceOp

__all__ = ["TransportEntry"]

FEW, MANY = "few", "many"  # amounts of data: less than a chunk, and several chunks


class _Bucket:
    """The tensors of one rank for a plan that runs in place, and the sums that the tensors must become."""

    def __init__(self, plan: Plan, rank: int, size: int, seed: int) -> None:
        self.areas, self.sums, self.before = [], [], []
        for i, count in enumerate(plan.counts):
            sources = [oracle.values(plan.dtype, count, r, seed=seed + i) for r in range(size)]
            self.areas.append(Area(sources[rank], offset=i % 3))
            self.sums.append(oracle.reduce(sources, plan.op))
            self.before.append(sources[rank])
        self.addresses = [area.buffer.address for area in self.areas]

    def fault(self, real: bool) -> str:
        """Return what is wrong with the tensors, in words. The result is empty if they are as expected.

        If ``real`` is true, they must hold the sums, and otherwise what they held before.
        """
        for area, wanted in zip(self.areas, self.sums if real else self.before):
            if area.damage() or area.array.tobytes() != np.ascontiguousarray(wanted).tobytes():
                return area.damage() or ("a sum is wrong" if real else "a void bucket was written to")
        return ""


class TransportEntry(TransportBase):
    """The tests of atomic buckets, for transports whose capabilities include ``atomic``."""

    def entry_plan(self, length: str) -> Plan:
        """Return a plan of integer tensors, whose sums do not depend on the order of addition.

        ``length`` is FEW or MANY. Skips the test if the transport cannot run a bucket atomically.
        """
        if not self.capabilities().atomic:
            pytest.skip("capabilities: buckets cannot run atomically")
        one = self.chunk_bytes // 4
        return Plan((3, 0, 200) if length == FEW else (5, 2 * one + 7, 0, one), DType.I32, ReduceOp.Sum)

    @only_where("atomic")
    @pytest.mark.parametrize("length", [FEW, MANY])
    def test_bound_memory_is_entered_again(self, length: str) -> None:
        """Each run of a bound plan uses the values that are in the bound memory at the time of the run.

        Other addresses can be bound later. A run can also be given addresses of which only some differ from the bound
        ones.
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
        """If at least one rank brings no real data, every rank gets False, and no rank's memory changes."""
        plan = self.entry_plan(length)
        for size in self.sizes:
            absent = [{rank} for rank in range(size)] + [set(range(size)), set(range(size - 1))]
            self._play_entries(size, plan, [ranks for one in absent for ranks in (one, set())])

    @only_where("atomic")
    def test_entries_between_other_collectives(self) -> None:
        """Void and complete buckets can alternate with barriers, and with broadcasts that the root may leave early."""
        plans = [self.entry_plan(FEW), self.entry_plan(MANY)]
        for size in self.sizes:
            for seed in range(3):
                draw = random.Random(seed)
                absent = [{r for r in range(size) if draw.random() < 0.2} for _ in range(30)]
                self._play_entries(size, plans[seed % 2], absent, others=draw)

    def _play_entries(self, size: int, plan: Plan, absent: list[set[int]], others: random.Random | None = None) -> None:
        """Run one bucket for each element of ``absent``, a set of the ranks that bring no real data, and check it.

        ``others`` draws which other collective follows each bucket; with None, no other collective runs.
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
