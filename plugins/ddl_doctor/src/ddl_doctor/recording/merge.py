"""Merge the parts of a timeline, one written by each rank, into one trace.

In the trace, each rank is shown as a process, and all times are times of the coordinator's clock.
"""

from __future__ import annotations

import contextlib
import json
import zipfile
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ddlcore.contracts.atomic import replacing

Event = dict[str, Any]


@dataclass
class Part:
    """One rank's part of a timeline: the content of the file that the rank has written."""

    pid: int
    events: list[Event]
    facts: Event = field(default_factory=dict)
    clocks: list[tuple[float, int, int]] = field(default_factory=list)  # (ts in us, offset in ns, error in ns)

    @property
    def error_us(self) -> float | None:
        """The largest error in µs of the rank's times after conversion to the coordinator's clock.

        None if the two clocks were never compared.
        """
        return max(error for _, _, error in self.clocks) / 1000 if self.clocks else None

    def offset_us(self, ts: float) -> float:
        """Return the difference in µs between the coordinator's clock and the rank's clock at the rank's time ``ts``.

        Add the result to ``ts`` to get the coordinator's time. Between two comparisons of the clocks, the difference is
        interpolated linearly. The result is 0 if the clocks were never compared.
        """
        looks = self.clocks
        if not looks:
            return 0.0
        at = bisect([look[0] for look in looks], ts)
        before, after = looks[max(at - 1, 0)], looks[min(at, len(looks) - 1)]
        share = (ts - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        return (before[1] + (after[1] - before[1]) * share) / 1000


def read_part(path: Path) -> Part:
    """Read the file ``path``, one rank's part of a timeline. The end of the file may be incomplete.

    Raises ValueError, with a message of one line, if the file is not a part of a timeline, and OSError if it cannot be
    read.
    """
    data = path.read_bytes()
    try:
        events: list[Event] = decoded(data)
    except ValueError:
        events = _mended(data.decode("utf-8", "replace"))
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{path} is no list of events, as a rank's part of a timeline is")
    try:
        facts: Event = next((e["args"] for e in events if e.get("name") == "TIMELINE"), {})
        looks = [e for e in events if e.get("name") == "CLOCK"]
        clocks = [(float(e["ts"]), int(e["args"]["offset_ns"]), int(e["args"]["error_ns"])) for e in looks]
        pid = int(events[0].get("pid", 0)) if events else 0
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is no rank's part of a timeline: its events lack the fields of ddl's") from None
    return Part(pid, events, facts, clocks)


def decoded(data: bytes) -> Any:
    """Parse the JSON text ``data`` and return its value. Raises ValueError if ``data`` is not JSON.

    Texts that are not valid Unicode are accepted, because Python's json module also writes such texts.
    """
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(data)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("lists within lists without end") from None


def _mended(text: str) -> list[Event]:
    """Return the events in the complete lines of ``text``, the content of a part whose end is missing."""
    events = []
    for line in text.split("\n"):  # only "\n" ends a record; other line breaks may be within a name
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line.rstrip(",]"))  # the text may end in ",]" if the last record is missing
            if isinstance(event, dict):
                events.append(event)
    return events


def aligned(part: Part) -> list[Event]:
    """Return the events of ``part`` with all times converted to the coordinator's clock. Durations are not changed."""
    moved = []
    for event in part.events:
        if "ts" in event:
            event = {**event, "ts": round(event["ts"] + part.offset_us(event["ts"]), 3)}
        moved.append(event)
    return moved


def merge(paths: Sequence[Path], target: Path) -> list[str]:
    """Merge the parts in the files ``paths`` into one trace, and write it to ``target``.

    If the name of ``target`` ends in .zip, the file is a zip archive of parts with a manifest; otherwise it is one JSON
    object. Return a line of text for each part that could not be read. Raises OSError if ``target`` cannot be written.
    """
    parts, problems = [], []
    for path in paths:
        try:
            part = read_part(path)
        except (OSError, ValueError) as error:
            problems.append(f"{path.name}: {error}")
        else:
            if part.events:  # else its rank was killed before it had written anything
                parts.append(part)
    rows = [aligned(part) for part in parts]
    _close_replays(parts, rows)
    _mark_ready(parts, rows)
    begin_us = min((event["ts"] for events in rows for event in events if "ts" in event), default=0.0)
    for events in rows:
        for event in events:
            if "ts" in event:
                event["ts"] = round(event["ts"] - begin_us, 3)
    with replacing(target) as new:
        if target.suffix == ".zip":
            _write_zip(new, parts, rows)
        else:
            _write_json(new, parts, rows)
    return problems


def _close_replays(parts: Sequence[Part], rows: Sequence[list[Event]]) -> None:
    """End the replay in which a rank was killed, if another process has recorded in its place.

    Otherwise a viewer would let it last until the end of the trace, around all that followed.
    """
    last = {part.pid: number for number, part in enumerate(parts)}
    for number, (part, events) in enumerate(zip(parts, rows)):
        changes = [event for event in events if event.get("name") == "REPLAY" and event.get("ph") in ("B", "E")]
        if number != last[part.pid] and changes and changes[-1]["ph"] == "B":
            begun = changes[-1]
            end_us = max(event["ts"] + event.get("dur", 0.0) for event in events if "ts" in event)
            events.append({key: begun[key] for key in ("name", "pid", "tid")} | {"ph": "E", "ts": round(end_us, 3)})


def _mark_ready(parts: Sequence[Part], rows: Sequence[list[Event]]) -> None:
    """Add an event to ``rows`` for each negotiated bucket and rank. It shows when the rank became ready.

    ``rows`` holds the events of each part. The new events are added to the part of the lowest rank that took part in
    the negotiation, so that they are shown at that rank's negotiation.
    """
    negotiated: dict[tuple[Any, ...], list[tuple[int, Event, float]]] = {}
    for number, (part, events) in enumerate(zip(parts, rows)):
        slices = [e for e in events if e.get("name", "").startswith("NEGOTIATE_") and e.get("ph") == "X"]
        tops = {(e["tid"], e["ts"]): e for e in events if e.get("ph") == "X" and "ready_us" in e.get("args", {})}
        for one in slices:
            end = round(one["ts"] + one["dur"], 3)
            top = tops.get((one["tid"], end))
            last = max(top["args"]["ready_us"], default=0.0) if top is not None else 0.0
            key = (part.facts.get("world"), one["args"]["bucket"], top["args"]["set"] if top is not None else 0)
            negotiated.setdefault(key, []).append((number, one, one["ts"] + last))
    for members in negotiated.values():
        first, at, _ = members[0]
        for number, _, ready in members:
            mark = {"name": str(parts[number].facts.get("rank", parts[number].pid)), "ph": "i", "s": "t"}
            clamped = min(max(ready, at["ts"]), at["ts"] + at["dur"])  # keep it visible, within the slice
            place = {"pid": at["pid"], "tid": at["tid"], "ts": round(clamped, 3)}
            rows[first].append({**mark, **place, "args": {"ready": at["args"]["bucket"], "at": round(ready, 3)}})


def metadata_of(parts: Sequence[Part]) -> Event:
    """Return the metadata of the trace into which ``parts`` are merged."""
    ranks = [
        {
            **part.facts,
            "pid": part.pid,
            "clock_offset_us": round(part.clocks[-1][1] / 1000, 3) if part.clocks else None,
            "clock_error_us": round(part.error_us, 3) if part.error_us is not None else None,
            "complete": any(event.get("name") == "END" for event in part.events),
        }
        for part in parts
    ]
    return {"writer": "ddl", "clock": "that of the coordinator; 0 is the first event", "ranks": ranks}


def _write_json(path: Path, parts: Sequence[Part], rows: Iterable[Sequence[Event]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","metadata":')
        file.write(json.dumps(metadata_of(parts)))
        file.write(',\n"traceEvents":[\n')
        separator = ""
        for events in rows:
            for event in events:
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")


def _write_zip(path: Path, parts: Sequence[Part], rows: Sequence[Sequence[Event]]) -> None:
    """Write a zip archive of all parts, with a manifest in Perfetto's format.

    All times are already times of one clock, so the manifest contains no clock offsets.
    """
    names: dict[str, int] = {}
    files = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for part, events in zip(parts, rows):
            count = names[f"rank{part.pid}"] = names.get(f"rank{part.pid}", -1) + 1
            name = f"rank{part.pid}.{count}.json" if count else f"rank{part.pid}.json"
            archive.writestr(name, json.dumps(events, separators=(",", ":")))
            files.append({"path": name, "machine": {"name": str(part.facts.get("host", ""))}})
        manifest = {"version": 1, "files": files, "attributes": {"ddl": json.dumps(metadata_of(parts))}}
        archive.writestr("perfetto_manifest.json", json.dumps({"perfetto_manifest": manifest}, indent=1))
