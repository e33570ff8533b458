"""Store the last 15 minutes of a job in bounded memory, and describe them as data for the live page.

This module does no I/O: its caller passes the records and the time. Control characters in texts from the job are
replaced here, and the page inserts these texts as plain text, never as HTML.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msgspec.structs import asdict as fields_of

from ddl_dashboard import records
from ddl_dashboard.rank_history import LinkRate, RankHistory
from ddl_dashboard.rank_statistics import RankFigures, rows_of
from ddl_dashboard.records import Heard, JobBegin, JobEvent, Over, RankState, Record, WorldState
from ddl_dashboard.waits import LastReport, Wait, waits_of
from ddlcore.text.numbers import UNKNOWN
from ddlcore.text.plain import plain
from ddlcore.text.ranks import span

KEPT_S = 900
POINT_S = 1.0
MOST_EVENTS = 200
MOST_RANKS = 1 << 16
MOST_ROWS = 128  # ranks that the page lists: those that differ from the others come first
MOST_LINKS = 8  # links that the chart shows
_MOST_LISTED_LINKS = 64
_LONGEST = 4000  # characters of an event
_LONGEST_NAME = 200
_MUCH_INPUT = 0.1  # if a slow rank waits for input for at least this share of its time, this is named as the reason
_SILENT = 2.5  # a rank is silent after so many intervals without a pulse
_Data = dict[str, Any]


class JobHistory:
    """The present state of one job and its recent past.

    ``now_s`` in the methods is the Unix time in seconds, as ``time.time()`` returns it.
    """

    def __init__(self, begin: JobBegin) -> None:
        self._begin = begin
        self._ranks = [RankHistory(plain(host)) for host in begin.hosts]
        self._events: deque[_Data] = deque(maxlen=MOST_EVENTS)
        self._points: deque[_Data] = deque(maxlen=int(KEPT_S / POINT_S))
        self._made = 0  # number of points so far, including the points that are no longer stored
        self._point_s = 0.0
        self._world: WorldState | None = None  # of an elastic job
        self.over: Over | None = None

    def take(self, record: Record, now_s: float) -> None:
        """Take a record, which was sent after those before. Figures of a rank that does not exist are ignored."""
        if isinstance(record, Heard) and 0 <= record.rank < len(self._ranks):
            self._ranks[record.rank].take(record.pulse, now_s)
        elif isinstance(record, RankState) and 0 <= record.rank < self._places(record):
            self._change(record)
        elif isinstance(record, WorldState):
            self._world = record
        elif isinstance(record, JobEvent):
            self._note(record.at_s, record.kind, record.text)
        elif isinstance(record, Over):
            self.over = record
            what = record.text or f"the job has ended: exit code {record.code}"
            self._note(now_s, "info" if record.code == 0 else "error", what)

    def _places(self, record: RankState) -> int:
        """Return below which number a rank may change its state so. In an elastic job, a rank that is new calls init."""
        return MOST_RANKS if record.state == records.INIT else len(self._ranks)

    def _change(self, record: RankState) -> None:
        while record.rank >= len(self._ranks):
            self._ranks.append(RankHistory(UNKNOWN, records.ENDED))
        rank = self._ranks[record.rank]
        rank.state, rank.text = record.state, plain(record.text[:_LONGEST])
        if record.host:
            rank.host = plain(record.host)
        if record.state == records.INIT:
            rank.forget()

    def _note(self, at_s: float, kind: str, text: str) -> None:
        lines = text[:_LONGEST].splitlines()
        self._events.append({"at": at_s, "kind": kind, "text": "\n".join(plain(line) for line in lines)})

    def tick(self, now_s: float) -> bool:
        """Add a point to the charts if about a second has passed since the last point. Return whether one was added."""
        if self.over is not None or now_s - self._point_s < POINT_S * 0.9:
            return False
        self._point_s = now_s
        self._points.append(self._point(now_s))
        self._made += 1
        return True

    def points_after(self, made: int) -> tuple[list[_Data], int]:
        """Return the points after the first ``made`` points, and the number of all points so far.

        Points that are no longer stored are left out.
        """
        new = min(self._made - made, len(self._points))
        return list(self._points)[len(self._points) - new :] if new > 0 else [], self._made

    def now(self, now_s: float) -> _Data:
        """Return the present state of the job as data for the page."""
        rows = self._rows()
        waits = self._waits(now_s)
        shown = [self._shown(row, waits, now_s) for row in rows]
        first = sorted(shown, key=lambda one: (not one["uneven"], one["rank"]))[:MOST_ROWS]
        links = self._links()
        return {
            "at": now_s,
            "begun": self._begin.begun_s,
            "title": plain(self._begin.title[:_LONGEST]),
            "version": plain(self._begin.version),
            "size": len(self._ranks),
            "hosts": len({rank.host for rank in self._ranks}),
            "world": None if self._world is None else fields_of(self._world),
            "over": None if self.over is None else {"code": self.over.code},
            "summary": self._summary(rows, links),
            "waits": [_wait(wait) for wait in waits[:20]] if self.over is None else [],
            "ranks": sorted(first, key=lambda one: one["rank"]),
            "links": links[:_MOST_LISTED_LINKS],
            "events": list(self._events),
        }

    # --- the parts

    def _rows(self) -> list[RankFigures]:
        pulses = {rank: tuple(one.pulses) for rank, one in enumerate(self._ranks)}
        return rows_of(pulses, [one.host for one in self._ranks])

    def _unheard_s(self, rank: RankHistory, now_s: float) -> float:
        """Return the seconds since the last pulse of a running rank, if the rank counts as silent; otherwise 0.0."""
        if rank.state != records.RUNNING or rank.heard_s is None:
            return 0.0
        unheard_s = now_s - rank.heard_s
        return unheard_s if unheard_s >= _SILENT * self._begin.interval_s else 0.0

    def _waits(self, now_s: float) -> list[Wait]:
        return waits_of(
            {
                number: LastReport(rank.activity, self._unheard_s(rank, now_s) > 0)
                for number, rank in enumerate(self._ranks)
                if rank.state == records.RUNNING and rank.activity is not None
            }
        )

    def _shown(self, row: RankFigures, waits: Sequence[Wait], now_s: float) -> _Data:
        rank = self._ranks[row.rank]
        state, remark = self._present_state(row, waits, now_s)
        compute, exposed, wait_input = _parts(row, rank)
        doing = rank.activity.doing if rank.activity is not None and rank.state == records.RUNNING else ""
        return {
            "rank": row.rank,
            "host": row.host,
            "state": state,
            "remark": remark,
            "doing": plain(doing),
            "uneven": state not in (records.RUNNING, records.ENDED, records.LEFT),
            "steps": row.steps,
            "step_s": rank.step_s(),
            "compute": compute,
            "exposed": exposed,
            "input": wait_input,
            "cpu": row.cpu,
            "memory": row.resident_bytes,
            "gpu": row.gpu,
            "gpu_memory": [row.gpu_used_bytes, row.gpu_total_bytes] if row.gpu_total_bytes else None,
        }

    def _present_state(self, row: RankFigures, waits: Sequence[Wait], now_s: float) -> tuple[str, str]:
        """Return the present state of a rank as a word, such as "late", and a remark that explains the state."""
        rank = self._ranks[row.rank]
        marks = "; ".join(row.marks)
        if rank.state != records.RUNNING or self.over is not None:
            return rank.state, rank.text
        unheard_s = self._unheard_s(rank, now_s)
        if unheard_s:
            return "silent", f"nothing heard for {unheard_s:.0f} s: stopped, or a call holds the interpreter lock"
        for wait in waits:
            if row.rank in wait.missing:
                return "late", f"others wait for it: {wait.waits_s:.0f} s"
        for wait in waits:
            if row.rank in wait.ready:
                whom = f"ranks {span(wait.missing)}" if len(wait.missing) > 1 else f"rank {span(wait.missing)}"
                return "waiting", f"waits for {whom if wait.missing else 'the network'}: {wait.waits_s:.0f} s"
        if "slow" not in marks:
            return records.RUNNING, marks
        share = rank.input_share() or 0.0
        return "slow", marks + (f"; {share:.0%} of its time it waits for input" if share >= _MUCH_INPUT else "")

    def _links(self) -> list[_Data]:
        """Return the links of all hosts as data for the page.

        For each host, the first link is the transport, with the bytes that it moves for the job. The other links are
        the network interfaces, with all bytes that they move.
        """
        hosts: dict[str, list[RankHistory]] = {}
        for rank in self._ranks:
            hosts.setdefault(rank.host, []).append(rank)
        found: list[_Data] = []
        for host, ranks in hosts.items():
            told = [rank for rank in ranks if rank.activity is not None and rank.activity.route]
            if told:
                rates = [rank.tensor_rate() for rank in told]
                route = told[0].activity.route if told[0].activity is not None else ""
                link = LinkRate(plain(route), sum(total for total, _ in rates), sum(rate for _, rate in rates))
                busy = _mean(rank.transport_share() for rank in told)
                found.append({"host": host, "kind": "tensors", "busy": busy, **asdict(link)})
            for link in (link for rank in ranks for link in rank.links()):
                most = max(link.sent_per_s, link.received_per_s) * 8
                busy = most / link.bits_per_s if link.bits_per_s else None
                found.append(
                    {"host": host, "kind": "interface", "busy": busy, **asdict(link), "name": plain(link.name)}
                )
        return found

    def _summary(self, rows: Sequence[RankFigures], links: Sequence[Mapping[str, Any]]) -> _Data:
        rates = [rate for rank in self._ranks if (rate := rank.steps_per_s()) is not None]
        parts = [_parts(row, self._ranks[row.rank]) for row in rows]
        step_s = _median(rank.step_s() for rank in self._ranks)
        return {
            "steps": max((row.steps for row in rows), default=0),
            "steps_per_s": _median(rates),
            "step_s": step_s,
            "compute": _mean(one[0] for one in parts),
            "exposed": _mean(one[1] for one in parts),
            "input": _mean(one[2] for one in parts),
            "bytes_per_s": sum(link["sent_per_s"] for link in links if link["kind"] == "tensors"),
            "memory_most": max((row.resident_bytes for row in rows), default=0),
            "memory_median": _median(float(row.resident_bytes) for row in rows if row.resident_bytes) or 0,
            "gpu_memory_most": max((row.gpu_used_bytes for row in rows), default=0),
            "running": sum(rank.state == records.RUNNING for rank in self._ranks),
        }

    def _point(self, now_s: float) -> _Data:
        links = self._links()
        summary = self._summary(self._rows(), links)
        step_ms = summary["step_s"] * 1e3 if summary["steps_per_s"] and summary["step_s"] else None
        point: _Data = {"t": round(now_s, 1), "rate": summary["steps_per_s"]}
        for part in ("compute", "exposed", "input"):
            share = summary[part]
            point[part] = None if share is None or step_ms is None else share * step_ms
        point["most"], point["median"] = summary["memory_most"] or None, summary["memory_median"] or None
        point["gpu"] = summary["gpu_memory_most"] or None
        point["links"] = {f"{one['host']} · {one['name']}": one["sent_per_s"] for one in links[:MOST_LINKS]}
        return point


def _parts(row: RankFigures, rank: RankHistory) -> tuple[float | None, float | None, float | None]:
    """Return three shares of a rank's time, from 0 to 1: computation, exposed communication and waiting for input.

    Time that is neither exposed communication nor waiting for input counts as computation. The third share is None if
    it is not known. All three are None if no steps were measured.
    """
    if row.waiting is None or row.step_s is None:
        return None, None, None
    share = rank.input_share()
    waits = None if share is None else min(max(share, 0.0), 1.0 - row.waiting)
    return 1.0 - row.waiting - (waits or 0.0), row.waiting, waits


def _wait(wait: Wait) -> _Data:
    return {
        "names": [plain(name[:_LONGEST_NAME]) for name in wait.names],
        "more": wait.more,
        "ready": span(wait.ready),
        "missing": span(wait.missing),
        "waits_s": wait.waits_s,
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
