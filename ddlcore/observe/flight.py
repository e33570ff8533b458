"""Keep the last actions and decisions of a rank in memory, and write them to a file if the job fails or stalls.

The JSON file describes a collective by the same fields as the flight recorders of other libraries: sequence number,
process group, sizes, state.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ddlcore.contracts.atomic import replacing
from ddlcore.messages.coding import decode_spec
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.observe.stacks import all_stacks

log = logging.getLogger("ddl")


class Flight:
    """The flight recorder of one rank.

    The threads that launch buckets in replay store their records in the list ``launches`` themselves, by one assignment
    for each bucket; see ``TensorQueue.launch``.
    """

    def __init__(self, records: int = 1024) -> None:
        """Create a recorder that keeps the last ``records`` records of each of three kinds; 0 keeps nothing.

        The kinds are launches in replay, negotiated buckets, and decisions. For launches, the number is rounded up to a
        power of two.
        """
        self._keeps = records > 0  # the list has at least one element, so that threads can always store a launch
        self.mask = (1 << max(records - 1, 0).bit_length()) - 1
        self.launches: list[tuple[int, int, Planned, int] | None] = [None] * (self.mask + 1)
        self._buckets: deque[dict[str, Any]] = deque(maxlen=records)
        self._decisions: deque[tuple[float, str, Mapping[str, Any]]] = deque(maxlen=records)

    def note(self, what: str, **said: Any) -> None:
        """Record a decision of this rank or of the coordinator. Any thread may call this.

        ``what`` is the name of the decision, and ``said`` holds its details.
        """
        self._decisions.append((time.monotonic(), what, said))

    def begin(self, bucket: Bucket) -> dict[str, Any]:
        """Record that a negotiated bucket starts. Return the record; pass it to ``done`` when the bucket has ended.

        Only the engine's thread calls this.
        """
        record = {"bucket": bucket, "at_s": time.monotonic(), "state": "started", "took_s": 0.0}
        self._buckets.append(record)
        return record

    def done(self, record: dict[str, Any], state: str = "completed") -> None:
        """Record that a bucket has ended in ``state``. ``record`` is the result of ``begin`` for this bucket."""
        record["state"] = state
        record["took_s"] = time.monotonic() - record["at_s"]

    def entries(self, under_way: Collection[int]) -> list[dict[str, Any]]:
        """Return a description of each recorded bucket for the file, the oldest first.

        ``under_way`` holds the numbers of the launches that are in flight.
        """
        found = []
        for launch in list(self.launches):
            if launch is not None and self._keeps:
                number, place, planned, at_ns = launch
                state = "started" if number in under_way else "completed"
                names = [name or "(no name)" for name in planned.names]
                entry = _entry(planned.set_id, planned.kind.name, names, at_ns * 1e-9, state)
                entry |= {"collective_seq_id": place, "launch": number, "replayed": True, **_sizes(planned.specs)}
                found.append(entry)
        for record in list(self._buckets):
            bucket: Bucket = record["bucket"]
            entry = _entry(bucket.set_id, bucket.kind.name, list(bucket.names), record["at_s"], record["state"])
            entry |= {"collective_seq_id": bucket.index, "replayed": False, "duration_ms": record["took_s"] * 1000}
            found.append(entry)
        found.sort(key=lambda entry: entry["time_created_ns"])
        for number, entry in enumerate(found):
            entry["record_id"] = number
        return found

    def dump(
        self,
        directory: Path,
        rank: int,
        size: int,
        reason: str,
        text: str,
        groups: Mapping[int, tuple[int, ...]],
        under_way: Collection[int],
        more: Mapping[str, Any],
    ) -> Path | None:
        """Write all records to the file ``rankN.REASON.json`` in ``directory``, and return the path of the file.

        The file is written completely or not at all. If it cannot be written, a warning is logged and the result is
        None. ``text`` explains ``reason`` in words. ``groups`` holds the ranks of each process set by its id.
        ``under_way`` holds the numbers of the launches that are in flight. ``more`` holds further fields for the file.
        Any thread may call this.
        """
        now_s, now_ns = time.monotonic(), time.time_ns()
        state = {
            "version": "ddl-1",
            "rank": rank,
            "size": size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "reason": reason,
            "text": text,
            "time_ns": now_ns,
            "clock": {"monotonic_ns": round(now_s * 1e9), "time_ns": now_ns},
            "pg_config": {str(one): {"name": str(one), "ranks": list(ranks)} for one, ranks in groups.items()},
            "entries": self.entries(under_way),
            "decisions": [
                {"at_ns": round(at_s * 1e9), "what": what, **said} for at_s, what, said in list(self._decisions)
            ],
            **more,
            "stacks": all_stacks(),
        }
        path = directory / f"rank{rank}.{reason}.json"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with replacing(path) as new:
                new.write_text(json.dumps(state, indent=1, default=str), encoding="utf-8")
        except OSError as error:
            log.warning("flight recorder: %s: %s", path, error.strerror)
            return None
        return path


def _entry(set_id: int, kind: str, names: list[str], at_s: float, state: str) -> dict[str, Any]:
    return {
        "record_id": 0,
        "pg_id": set_id,
        "process_group": [str(set_id), ""],
        "profiling_name": f"ddl:{kind.lower()}",
        "names": names,
        "time_created_ns": round(at_s * 1e9),
        "state": state,
        "retired": state != "started",
        "is_p2p": False,
    }


def _sizes(specs: tuple[bytes, ...]) -> dict[str, Any]:
    known = [decode_spec(spec) for spec in specs]
    sizes = [list(spec.extents) for spec in known]
    return {"input_sizes": sizes, "output_sizes": sizes, "input_dtypes": [spec.label for spec in known]}
