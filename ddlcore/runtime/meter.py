"""Counts and times the work of one rank while it runs. This module knows only names and numbers, and never waits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from ddlcore.messages.elastic import WorldReport
from ddlcore.types import Kind

now_ns = time.perf_counter_ns
_WITH_TENSORS = (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER)


class WorldStats(TypedDict):
    """What ``ddl.stats()["world"]`` contains."""

    generation: int
    size: int
    ranks_lost: int  # processes that have failed
    ranks_joined: int  # processes that were let in after the first world
    seconds_lost: float  # from the first sign of a change until all members of the next world were there, summed


class Stats(TypedDict):
    """What ``ddl.stats()`` returns: what this process has counted since its ``init``.

    In an elastic job, the counts go on from one world to the next.

    - ``control_messages``: messages to and from the coordinator. A step in the steady state adds none.
    - ``commit_messages``: messages to other hosts which say that this rank has launched a bucket on a device. This
      count is 0 if all data is in host memory. It is also 0 if all ranks are on one host, because they use shared
      memory for this.
    - ``pulse_messages``: messages to the launcher about the state of this rank or its parameters, if the launcher asked
      for such messages. They do not count as control messages.
    - ``stall_messages``: messages about waits that last too long. They are sent by a timer, and do not count as control
      messages.
    - ``steps``: launched periods of a schedule. A period is one pass through the schedule. Before a schedule is found,
      steps are not counted.
    - ``buckets_negotiated``: buckets that the coordinator decided and this rank ran.
    - ``buckets_replayed``: completed buckets of a schedule, including the buckets whose sizes are negotiated in each
      step.
    - ``buckets_void``: buckets that were launched in vain and ran again later.
    - ``divergences``: how often this rank asked to leave replay.
    - ``bytes``: by operation, the bytes of this rank's tensors in delivered buckets, as the user gave them. This does
      not depend on compression, on how often the transport moves them, or on what the other ranks send. The tensor of a
      broadcast counts on every member.
    - ``encoded_bytes``: the bytes after encoding of those tensors whose compressor makes values that cannot be added.
    - ``seconds``: by stage. ``idle`` is the time for which the engine waits for tensors and for the coordinator.
      ``pack`` and ``unpack`` are copies into and out of transport memory. ``device`` is the time for which the host
      waits for a device's queue: for tensors that are copied to the host, and for buckets that only the device can show
      to be valid. ``commit`` is the time of commit messages, with the wait for later peers. ``transport`` is the rest
      of the time of buckets: bytes on their way, and the wait for later peers. ``user`` is the time for which user
      threads are in ``wait``, summed over threads.
    - ``routes``: for each process set of which this rank is a member, the transport that serves it, and why.
    - ``world``: the present world (``generation``, ``size``), and what has happened to the job so far: ``ranks_lost``,
      ``ranks_joined`` and ``seconds_lost``. These are equal on all ranks, also on those that have joined later. In a job
      that is not elastic, ``generation`` is 1 and nothing is lost.
    """

    control_messages: int
    commit_messages: int
    stall_messages: int
    pulse_messages: int
    steps: int
    buckets_negotiated: int
    buckets_replayed: int
    buckets_void: int
    divergences: int
    bytes: dict[str, int]
    encoded_bytes: int
    seconds: dict[str, float]
    routes: dict[int, str]
    world: WorldStats


def world_stats(size: int, report: WorldReport | None) -> WorldStats:
    """Return the statistics of a world of ``size`` ranks. ``report``: None if the job is not elastic."""
    known = report or WorldReport(1, size)
    return WorldStats(
        generation=known.generation,
        size=size,
        ranks_lost=known.ranks_lost,
        ranks_joined=known.ranks_joined,
        seconds_lost=known.seconds_lost,
    )


def added(before: Stats, now: Stats) -> Stats:
    """Return the counts of ``now`` plus those of ``before``, which the same process counted in its earlier worlds.

    Routes and world are those of ``now``.
    """
    earlier, whole = cast("dict[str, Any]", before), dict(cast("dict[str, Any]", now))
    for key, value in earlier.items():
        if isinstance(value, int):
            whole[key] += value
        elif key in ("bytes", "seconds"):
            own = whole[key]
            whole[key] = {name: value.get(name, 0) + own.get(name, 0) for name in {**value, **own}}
    return cast("Stats", whole)


class Meter:
    """The counters of one rank, see ``Stats``.

    Only one thread at a time writes a counter, without a lock. So a reader may see that the last bucket is counted in
    some counters and not yet in others.
    """

    __slots__ = (
        "alone_ns",
        "busy_ns",
        "commit_ns",
        "commits",
        "control",
        "device_ns",
        "divergences",
        "encoded",
        "idle_ns",
        "nbytes",
        "negotiated",
        "pack_ns",
        "pulses",
        "replayed",
        "stalls",
        "unpack_ns",
        "void",
    )

    def __init__(self) -> None:
        self.control = 0  # written by the control thread
        self.stalls = 0  # written by the control thread
        self.pulses = 0  # written by the control thread
        self.divergences = 0  # written by a waiting thread, once per epoch
        self.commits = 0  # this and all below: written by the thread that runs buckets
        self.negotiated = 0
        self.replayed = 0
        self.void = 0
        self.idle_ns = 0
        self.busy_ns = 0
        self.alone_ns = 0  # written by user threads that run their bucket in the engine's place
        self.pack_ns = 0
        self.unpack_ns = 0
        self.device_ns = 0
        self.commit_ns = 0
        self.nbytes = [0] * len(Kind)
        self.encoded = 0

    def stats(self, user_s: float, routes: Mapping[int, str], steps: int, world: WorldStats) -> Stats:
        """Return all counters as ``Stats``. The arguments are values that other objects keep."""
        transport_ns = self.busy_ns - self.pack_ns - self.unpack_ns - self.device_ns - self.commit_ns
        counted = Stats(
            control_messages=self.control,
            commit_messages=self.commits,
            stall_messages=self.stalls,
            pulse_messages=self.pulses,
            steps=steps,
            buckets_negotiated=self.negotiated,
            buckets_replayed=self.replayed,
            buckets_void=self.void,
            divergences=self.divergences,
            bytes={kind.name.lower(): self.nbytes[kind] for kind in _WITH_TENSORS if self.nbytes[kind]},
            encoded_bytes=self.encoded,
            seconds={
                "idle": max(self.idle_ns, 0) * 1e-9,
                "pack": self.pack_ns * 1e-9,
                "transport": max(transport_ns, 0) * 1e-9,
                "unpack": self.unpack_ns * 1e-9,
                "commit": self.commit_ns * 1e-9,
                "device": self.device_ns * 1e-9,
                "user": user_s + self.alone_ns * 1e-9,
            },
            routes=dict(routes),
            world=world,
        )
        return counted
