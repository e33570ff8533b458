"""Convert the records of a rank to events of a Chrome trace, with the names that Horovod uses.

This module uses no files, threads or clocks.

The phases of one bucket are shown in one row, one after the other. Buckets that overlap in time are in different rows.
Events that occur hundreds of times a second are formatted as text without the json module. This is faster, and the
training needs the interpreter at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ddl_doctor.recording.readiness import Readiness
from ddl_doctor.recording.ring_buffer import Record, RecordKind
from ddlcore.messages.coding import decode_spec
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.types import Kind

MEMCPY_IN, MEMCPY_OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
USER, REPLAY, FIRST_ROW = 1, 2, 10  # ids of rows (threads) in the trace
WORLD = "WORLD "  # name of the mark of a world, before its number
SHOWN_NAMES = 8  # names shown for a replayed bucket; the SCHEDULE event has them all

_WITHOUT_BYTES = (Kind.JOIN, Kind.ADD_SET, Kind.REMOVE_SET)


class _Place:
    """The constant part of the events of one bucket of a schedule: it is the same for each run of the bucket."""

    def __init__(self, planned: Planned, schedule: int, position: int, wire: str) -> None:
        args: dict[str, Any] = {"tensors": len(planned.names), "set": planned.set_id, "schedule": schedule}
        args["position"] = position
        args["names"] = list(planned.names[:SHOWN_NAMES])
        if len(planned.specs) == 1:
            spec = decode_spec(planned.specs[0])
            args["dtype"], args["shape"] = spec.label, list(spec.extents)
        self.args = _dump(args)[:-1]  # without the closing brace, so that more can follow
        self.wire = wire


class TraceWriter:
    """Converts one rank's records to events. Each event is a JSON text.

    In the trace, the rank is the process ``pid``. ``transport(set_id, kind)`` returns the name of the transport, such
    as "shm". ``mark_cycles``: add an event at the begin of each period. ``world``: what is known of the present world of
    an elastic job, for its mark.
    """

    def __init__(
        self,
        pid: int,
        rank: int,
        host: str,
        transport: Callable[[int, Kind], str],
        mark_cycles: bool = False,
        world: Mapping[str, Any] | None = None,
    ) -> None:
        self._pid = pid
        self._rank = rank
        self._host = host
        self._transport = transport
        self._mark_cycles = mark_cycles
        self._world = world
        self._rows: list[int] = []  # by row: end of its last bucket
        self._ready = Readiness()
        self._decided: dict[int, int] = {}  # time, by index of the bucket
        self._places: dict[tuple[int, int], _Place] = {}  # by schedule and position: buckets that have run
        self._epoch = 0
        self._schedule = -1
        self._buckets: Sequence[Planned] = ()
        self._since_ns = 0  # start of the present replay; 0: none
        self._frozen_ns = 0

    def begin(self, facts: Mapping[str, Any], now_ns: int) -> list[str]:
        """Return the events at the begin of the trace. One event contains ``facts``, a description of the recording."""
        return [
            self._meta("process_name", 0, {"name": f"rank {self._rank} ({self._host})"}),
            self._meta("process_sort_index", 0, {"sort_index": self._pid}),
            *self._name_row(USER, "waits in ddl"),
            *self._name_row(REPLAY, "replay"),
            self._instant("TIMELINE", REPLAY, now_ns, facts),
            *([] if self._world is None else [self._mark_world(self._world, now_ns)]),
        ]

    def write(self, records: Iterable[Record]) -> list[str]:
        """Return the events for ``records``. Pass each record exactly once, in the order of the ring buffer."""
        events: list[str] = []
        for record in records:
            code, at_ns = record[1], record[2]
            if code == RecordKind.BUCKET:
                self._bucket(record, events)
            elif code == RecordKind.READY_TOGETHER:
                self._ready.together(record[3], at_ns)
            elif code == RecordKind.WAITED:
                self._slice("WAIT", USER, at_ns, record[3], events)
            elif code == RecordKind.READY:
                self._ready.one(record[3], record[4], record[5], at_ns)
            elif code == RecordKind.DECIDED:
                self._decided[record[3].index] = at_ns
            else:
                self._change(record, events)
        return events

    def end(self, now_ns: int, lost: int) -> list[str]:
        """Return the events at the end of the trace.

        ``lost`` is the number of records that were overwritten before they were read.
        """
        events: list[str] = []
        self._close_replay(now_ns, events)
        return [*events, self._instant("END", REPLAY, now_ns, {"lost_records": lost})]

    def _mark_world(self, world: Mapping[str, Any], now_ns: int) -> str:
        """Return the mark of the beginning of a world; a viewer draws it across all rows of the rank."""
        head = self._head(f"{WORLD}{world['generation']}", "i", REPLAY, now_ns)
        return f'{head},"s":"p","args":{_dump(world)}}}'

    # --- replay begins, or ends

    def _change(self, record: Record, events: list[str]) -> None:
        code, at_ns = record[1], record[2]
        if code == RecordKind.CLOCK:
            events.append(self._instant("CLOCK", REPLAY, at_ns, {"offset_ns": record[3], "error_ns": record[4]}))
        elif code == RecordKind.DISCOVER:
            self._schedule = -1
            events.append(self._instant("DISCOVER", REPLAY, at_ns, {"epoch": record[3]}))
        else:
            self._close_replay(at_ns, events)
        if code == RecordKind.REPLAY:
            _, _, _, self._epoch, self._schedule, self._buckets, start = record
            self._since_ns = at_ns
            args = {"epoch": self._epoch, "schedule": self._schedule, "place": start, "buckets": len(self._buckets)}
            # The end of the replay is a separate event, so that a file without its end still shows this replay.
            events.append(f'{self._head("REPLAY", "B", REPLAY, at_ns)},"args":{_dump(args)}}}')
        elif code == RecordKind.FREEZE:
            self._frozen_ns = at_ns
        elif code == RecordKind.DRAIN:
            _, _, _, ended_ns, epoch, valid, void = record
            if self._frozen_ns:
                self._slice("FREEZE", REPLAY, self._frozen_ns, at_ns, events, _dump({"epoch": epoch}))
                self._frozen_ns = 0
            drained = {"epoch": epoch, "valid": valid, "void": void}
            self._slice("DRAIN", REPLAY, at_ns, ended_ns, events, _dump(drained))

    def _close_replay(self, at_ns: int, events: list[str]) -> None:
        if self._since_ns:
            self._since_ns = 0
            events.append(f"{self._head('REPLAY', 'E', REPLAY, at_ns)}}}")

    # --- buckets

    def _bucket(self, record: Record, events: list[str]) -> None:
        _, _, begun_ns, ended_ns, pack_ns, unpack_ns, place, what, nbytes = record
        ready = self._ready.of(what, begun_ns)
        first_ns, last_ns = (ready[0], ready[0]) if len(ready) == 1 else (min(ready), max(ready))
        replayed = place >= 0
        asked_ns = last_ns if replayed else begun_ns  # since then, the bucket only waits for the engine
        if isinstance(what, Bucket):
            decided_ns = self._decided.pop(what.index, begun_ns)
            asked_ns = asked_ns if replayed else min(max(decided_ns, last_ns), begun_ns)
        top_ns = first_ns if replayed else asked_ns
        row = self._row(first_ns, ended_ns, events)
        name = f"e{self._epoch}.p{place}" if replayed else f"d{what.index}" if isinstance(what, Bucket) else "d"
        if top_ns > first_ns:
            self._slice(f"NEGOTIATE_{what.kind.name}", row, first_ns, top_ns, events, f'{{"bucket":"{name}"}}')
        offsets = "" if first_ns == last_ns else ",".join([f"{(at_ns - first_ns) / 1000:.3f}" for at_ns in ready])
        own = (
            f'"bucket":"{name}","nbytes":{nbytes},"entered_us":{(begun_ns - top_ns) / 1000:.3f},"ready_us":[{offsets}]'
        )
        same, wire = self._same(what, place, events)
        if replayed and self._buckets:
            own += f',"period":{place // len(self._buckets)}'
        self._slice(what.kind.name, row, top_ns, ended_ns, events, f"{same},{own}}}")
        if what.kind in _WITHOUT_BYTES:
            return
        wire_ns = min(begun_ns + pack_ns, ended_ns)
        wired_ns = max(ended_ns - unpack_ns, wire_ns)
        if replayed and last_ns > first_ns:
            self._slice("WAIT_FOR_DATA", row, first_ns, last_ns, events)
        if begun_ns > asked_ns:
            self._slice("QUEUE", row, asked_ns, begun_ns, events)
        if wire_ns > begun_ns:
            self._slice(MEMCPY_IN, row, begun_ns, wire_ns, events)
        if wired_ns > wire_ns:
            self._slice(wire, row, wire_ns, wired_ns, events)
        if ended_ns > wired_ns:
            self._slice(MEMCPY_OUT, row, wired_ns, ended_ns, events)
        if self._mark_cycles and replayed and self._buckets and place % len(self._buckets) == 0:
            events.append(self._instant("CYCLE_START", row, begun_ns, {"period": place // len(self._buckets)}))

    def _same(self, what: Bucket | Planned, place: int, events: list[str]) -> tuple[str, str]:
        """Return two texts about the bucket ``what``: the constant arguments of its event, and the name of a phase.

        The constant arguments are the same for each run of the bucket. They are JSON without the closing brace, so that
        the caller can add arguments. The phase is the bucket's communication. ``place`` is the bucket's number in the
        replay (see ``TraceHooks.completed``), or -1. If a bucket of the schedule runs for the first time, a SCHEDULE
        event, which describes the bucket, is added to ``events``.
        """
        if place < 0 or not self._buckets:
            args = {"tensors": len(what.names), "set": what.set_id, "names": list(what.names)}
            return _dump(args)[:-1], self._wire(what.set_id, what.kind)
        position = place % len(self._buckets)
        key = (self._schedule, position)
        known = self._places.get(key)
        if known is None:
            planned = self._buckets[position]
            wire = self._wire(what.set_id, what.kind)
            known = self._places[key] = _Place(planned, self._schedule, position, wire)
            specs = [decode_spec(spec) for spec in planned.specs]
            nbytes = [prod(spec.shape) * spec.dtype.itemsize for spec in specs]
            told = {"schedule": self._schedule, "position": position, "names": planned.names, "nbytes": nbytes}
            events.append(self._instant("SCHEDULE", REPLAY, self._since_ns, told))
        return known.args, known.wire

    def _wire(self, set_id: int, kind: Kind) -> str:
        return f"{self._transport(set_id, kind).upper().replace('+', '_')}_{kind.name}"

    def _row(self, since_ns: int, until_ns: int, events: list[str]) -> int:
        """Return the id of the first row that is free at ``since_ns``, and mark the row as used until ``until_ns``.

        If no row is free, add a row, and add the events with its name to ``events``.
        """
        for row, ended_ns in enumerate(self._rows):
            if ended_ns <= since_ns:
                self._rows[row] = until_ns
                return FIRST_ROW + row
        self._rows.append(until_ns)
        row = FIRST_ROW + len(self._rows) - 1
        events += self._name_row(row, f"buckets {len(self._rows)}")
        return row

    # --- events

    def _head(self, name: str, phase: str, tid: int, at_ns: int) -> str:
        return f'{{"name":"{name}","ph":"{phase}","pid":{self._pid},"tid":{tid},"ts":{at_ns // 1000}.{at_ns % 1000:03d}'

    def _slice(self, name: str, tid: int, since_ns: int, until_ns: int, events: list[str], args: str = "") -> None:
        took_ns = until_ns - since_ns if until_ns > since_ns else 0
        head = self._head(name, "X", tid, since_ns)
        told = f',"args":{args}' if args else ""
        events.append(f'{head},"dur":{took_ns // 1000}.{took_ns % 1000:03d}{told}}}')

    def _instant(self, name: str, tid: int, at_ns: int, args: Mapping[str, Any]) -> str:
        return f'{self._head(name, "i", tid, at_ns)},"s":"t","args":{_dump(args)}}}'

    def _meta(self, name: str, tid: int, args: Mapping[str, Any]) -> str:
        return f'{{"name":"{name}","ph":"M","pid":{self._pid},"tid":{tid},"args":{_dump(args)}}}'

    def _name_row(self, tid: int, name: str) -> list[str]:
        return [
            self._meta("thread_name", tid, {"name": name}),
            self._meta("thread_sort_index", tid, {"sort_index": tid}),
        ]


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
