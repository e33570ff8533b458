"""Run one rank of a benchmark. One of the ranks reports which measurement begins, and the measured times."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import ddlcore.api as ddl
from ddl_doctor.bench.contenders import arrays_for, check, contenders
from ddl_doctor.bench.plan import OPERATIONS, BenchPlan
from ddl_doctor.bench.results import MeasuredRow
from ddl_doctor.bench.timing import Together, measure
from ddlcore.contracts.bench import BenchPeer
from ddlcore.plug.registry import Registry
from ddlcore.process.job import Job

Tell = Callable[[dict[str, Any]], None]


def bench_rank(plan: BenchPlan, pipe: str, teller: int | None) -> list[dict[str, Any]]:
    """Run the benchmark in the process of one rank.

    The rank ``teller`` writes each message (see ``measure_all``) as a line of JSON to a named pipe on its own host;
    ``pipe`` is the path of the pipe. If ``teller`` is None, nothing is written, and rank 0 returns the messages. In all
    other cases, the returned list is empty.
    """
    ddl.init()
    job = ddl.current_job()
    peers = {name: job.registry.load(job.registry.named(Registry.bench_peers, name))() for name in plan.peers}
    kept: list[dict[str, Any]] = []
    with open(pipe if job.rank == teller else os.devnull, "w", encoding="utf-8", buffering=1) as file:

        def tell(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=file)
            if teller is None and job.rank == 0:
                kept.append(message)

        open_peers(job, peers)
        measure_all(job, plan, peers, tell)
        for peer in peers.values():
            peer.close()
    ddl.shutdown()
    return kept


def open_peers(job: Job, peers: Mapping[str, BenchPeer]) -> None:
    """Open the peers. Every rank must call this function. An exception that a peer raises is passed on."""
    for name, peer in peers.items():
        peer.open(job.context(f"bench-{name}"))


def measure_all(job: Job, plan: BenchPlan, peers: Mapping[str, BenchPeer], tell: Tell) -> None:
    """Measure everything in ``plan``, and call ``tell`` with each message about the measurements.

    Every rank must call this function with the same plan and peers, and all ranks pass the same messages to ``tell``.
    The first message is {"transport": name}. Then two messages follow for each operation and size:
    {"begin": [operation, nbytes]} before the measurement, and {"row": MeasuredRow.as_json()} after the measurement.
    """
    communicator = job.sets.communicator(0)
    together = Together(communicator.transport)
    tell({"transport": communicator.route.name})

    def replayed() -> int:
        return job.stats()["buckets_replayed"]

    for operation in plan.operations:
        for nbytes in plan.sizes:
            tell({"begin": [operation, nbytes]})
            kind = OPERATIONS[operation]
            memory = arrays_for(kind, nbytes, plan.dtype, job.size)
            calls = contenders(job, peers, kind, memory, plan.whole)
            exact = {name: call for name, call in calls.items() if name not in peers or not peers[name].floor}
            check(kind, memory, exact, job.rank, job.size)
            times, share = measure(calls, together, plan.rounds, plan.budget_s, replayed)
            tell({"row": MeasuredRow(operation, memory.nbytes, times, share).as_json()})
