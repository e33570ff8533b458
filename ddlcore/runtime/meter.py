"""What one rank counts and times while it runs; knows names and numbers, and never waits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from ddlcore.types import Kind

__all__ = ["Meter", "Stats", "now_ns"]

now_ns = time.perf_counter_ns
_WITH_TENSORS = (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER)


_FORMER_KEYS = {f"batches_{how}": f"buckets_{how}" for how in ("negotiated", "replayed", "void")}


class Stats(TypedDict):
    """What ``ddl.stats()`` returns: this rank since its ``init``.

    ``control_messages``: sent to the coordinator and received from it; a steady step adds none.
    ``commit_messages``: by which this rank told the others that it had launched what is queued on its
    devices; 0 where all of a bucket's data is in host memory, or on one host, where shared memory tells.
    ``pulse_messages``: that told the launcher how this rank or its parameters are, where it wants to know; beside the
    control messages.
    ``stall_messages``: about what waits too long, beside the control messages, on their own timer.
    ``steps``: periods of a schedule that were launched; none is known, and counted, before a schedule is found.
    ``buckets_negotiated``: decided by the coordinator, and run. ``buckets_replayed``: of a schedule,
    handed over; ragged slots, which are negotiated at their place, are among them. ``buckets_void``:
    launched in vain, and run again later. ``divergences``: how often this rank asked to leave replay.
    ``bytes``: by operation, of this rank's tensors in buckets that were handed over, as the user gave
    them: whatever a compressor makes of them, how often the transport moves them, and what the others
    send. Of a broadcast the tensor counts on every member. ``encoded_bytes``: what compressors whose values
    cannot be added have made of those of them that they encode.
    ``seconds``: by stage. Of the engine's time ``idle`` is what it waits for tensors and for the
    coordinator; ``pack`` and ``unpack`` are copies into and out of transport memory; ``transport`` is
    the rest of what buckets take: bytes on their way, and peers that come later. ``device`` is what
    the host waits for a device's queue: for tensors on their way down, and for buckets whose validity
    nothing else tells. ``commit`` is what commit messages
    take, peers that come later included. ``user`` is what the user's threads stand in ``wait``, all added up.
    ``routes``: by process set that this rank is a member of, the transport that serves it, and why.
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


class Meter:
    """Plain slots, each with one writer; a reader may see the last bucket half counted. See ``Stats``."""

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
        self.control = 0  # the control thread's
        self.stalls = 0  # the control thread's
        self.pulses = 0  # the control thread's
        self.divergences = 0  # whoever waits counts; it happens once an epoch
        self.commits = 0  # from here on the engine's
        self.negotiated = 0
        self.replayed = 0
        self.void = 0
        self.idle_ns = 0
        self.busy_ns = 0
        self.alone_ns = 0  # of calls that ran their bucket themselves, with the engine's right to count
        self.pack_ns = 0
        self.unpack_ns = 0
        self.device_ns = 0
        self.commit_ns = 0
        self.nbytes = [0] * len(Kind)
        self.encoded = 0

    def stats(self, user_s: float, routes: Mapping[int, str], steps: int = 0) -> Stats:
        """All of it, in words; ``user_s``, ``routes`` and ``steps`` are kept elsewhere."""
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
        )
        return cast("Stats", _WithFormerKeys(counted))


class _WithFormerKeys(dict[str, Any]):
    """Statistics that can be read by the keys of earlier versions too, with a warning."""

    def __missing__(self, key: str) -> Any:
        if key not in _FORMER_KEYS:
            raise KeyError(key)
        new = _FORMER_KEYS[key]
        warnings.warn(
            f"stats()[{key!r}] is called {new!r} now; the old key will go in a later version",
            FutureWarning,
            stacklevel=2,
        )
        return self[new]
