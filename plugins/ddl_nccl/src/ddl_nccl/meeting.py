"""The meeting of a communicator's ranks before NCCL is called.

The meeting checks that all ranks are present, each with its own device. Rank 0 collects the reports of all ranks and
checks that all have the same NCCL. Then rank 0 answers with NCCL's unique id or with the fault that it has found. So
the error names a rank that is missing or would fail, and is raised within the time limit. NCCL itself would wait
without end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddl_nccl.errors import explained
from ddl_nccl.library import OLDEST, spelled
from ddlcore.contracts.store import PrefixStore, Store
from ddlcore.contracts.transport import Context
from ddlcore.errors import DeadlineExceeded, TransportError

SLICE_S = 0.25


@dataclass(frozen=True)
class Arrival:
    """The facts that a rank reports about itself in the meeting of all ranks."""

    rank: int  # in the world
    host: int
    device: str  # the same string on all ranks that see this device; "": unknown
    version: int  # NCCL's code
    trouble: str = ""  # why it cannot take part

    def to_bytes(self) -> bytes:
        """Return this report as bytes for the store."""
        return json.dumps([self.rank, self.host, self.device, self.version, self.trouble]).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Arrival:
        """Return the report that ``to_bytes`` has converted to ``raw``.

        Raises ValueError if ``raw`` is not a report.
        """
        rank, host, device, version, trouble = json.loads(raw)
        return cls(int(rank), int(host), str(device), int(version), str(trouble))


def meet(context: Context, arrival: Arrival, unique_id: Callable[[], bytes], check: Callable[[], None]) -> bytes:
    """Return NCCL's unique id that all ranks of ``context`` must use.

    ``arrival`` is this rank's own report. ``unique_id`` makes a unique id, and is called on rank 0 only. ``check`` is
    called repeatedly and may raise an exception to end the wait. Raises DeadlineExceeded after ``context.timeout_s``,
    and TransportError on every rank if NCCL cannot be used.
    """
    until_s = time.monotonic() + context.timeout_s
    store = PrefixStore("nccl/", context.store)
    store.set(str(context.rank), arrival.to_bytes())
    if context.rank == 0:
        store.set("answer", answer := _gathered(context, store, until_s, check, unique_id))
    else:
        answer = _awaited(context, store, "answer", until_s, check)
    if answer[:1] != b"+":
        raise TransportError(answer[1:].decode())
    return answer[1:]


def _gathered(
    context: Context, store: Store, until_s: float, check: Callable[[], None], unique_id: Callable[[], bytes]
) -> bytes:
    keys = (str(rank) for rank in range(context.size))
    arrivals = [Arrival.from_bytes(_awaited(context, store, key, until_s, check)) for key in keys]
    wrong = objection(arrivals)
    if not wrong:
        try:
            return b"+" + unique_id()
        except Exception as error:
            wrong = str(explained("making an id for the communicator", error))
    return b"-" + wrong.encode()


def objection(arrivals: list[Arrival]) -> str:
    """Return why NCCL cannot be used by these ranks, in one line that says what to do.

    The result is empty if NCCL can be used.
    """
    troubled = next((a for a in arrivals if a.trouble), None)
    if troubled is not None:
        return f"{troubled.trouble} (on rank {troubled.rank})"
    old = next((a for a in arrivals if a.version < OLDEST), None)
    if old is not None:
        return (
            f"nccl: rank {old.rank} has NCCL {spelled(old.version)}, which is older than {spelled(OLDEST)}; "
            "pip install --upgrade nvidia-nccl-cu13 (or nvidia-nccl-cu12: as the framework's CUDA)"
        )
    # NCCL itself compares the whole version when it connects, and refuses patch releases that differ.
    other = next((a for a in arrivals if a.version != arrivals[0].version), None)
    if other is not None:
        return (
            f"nccl: rank {arrivals[0].rank} has NCCL {spelled(arrivals[0].version)} and rank {other.rank} "
            f"{spelled(other.version)}; install the same one on every host"
        )
    seen: dict[tuple[int, str], int] = {}
    for a in arrivals:
        if a.device and seen.setdefault((a.host, a.device), a.rank) != a.rank:
            return (
                f"nccl: ranks {seen[a.host, a.device]} and {a.rank} are on one GPU ({a.device}), which NCCL refuses; "
                "start at most as many ranks on a host as it has GPUs, "
                "or leave --backend to auto, which goes by host memory then"
            )
    return ""


def _awaited(context: Context, store: Store, key: str, until_s: float, check: Callable[[], None]) -> bytes:
    while True:
        check()
        left_s = max(0.0, until_s - time.monotonic())
        try:
            return store.get(key, min(left_s, SLICE_S))
        except DeadlineExceeded:
            if left_s > SLICE_S:
                continue
            who = "rank 0 did not answer" if key == "answer" else f"rank {context.members[int(key)].rank} did not come"
            raise DeadlineExceeded(
                f"nccl: {who} within {context.timeout_s:g} s to open {context.name or 'the communicator'}"
            ) from None
