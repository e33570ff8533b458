"""Draw a summary as one self-contained HTML page, with tables and with charts in SVG. Computes no results itself."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddlcore.observe.summary import Run, Summary, runs_of
from ddlcore.text import html
from ddlcore.text.numbers import short_size
from ddlcore.text.plain import plain

Event = dict[str, Any]
Table = tuple[str, list[str], list[list[str]]]  # title, head, rows

WIDTH, LEFT, ROW, BAR = 860, 110, 26, 16
SHOWN_RANKS = 32  # in charts
COMPUTE, EXPOSED, HIDDEN, COPY, WAIT, NEGOTIATE = "#c9d6e2", "#d1495b", "#2a6f97", "#e9a03b", "#a3b18a", "#8d6cab"


def sentences(summary: Summary) -> list[str]:
    """Return the main results of ``summary`` as sentences."""
    said = []
    if summary.ranks:
        step = statistics.median(row.step_ms for row in summary.ranks)
        steps = max(row.steps for row in summary.ranks)
        of = f"a step ({step:.2f} ms, median of {steps} that ran from memory)" if steps else "what was recorded"
        said.append(f"{summary.exposed:.1%} of {of} is spent waiting in ddl: exposed communication.")
        overlap = statistics.fmean(row.overlap for row in summary.ranks)
        said.append(f"{overlap:.0%} of the communication time is hidden: the user's own code runs meanwhile.")
    said.append(
        f"{summary.replayed} buckets ran from memory and {summary.negotiated} were negotiated; negotiation took "
        f"{summary.negotiation_s:.3f} s, bytes on their way {summary.wire_s:.3f} s, copies {summary.copy_s:.3f} s, all ranks together."
    )
    if summary.tensors_a_bucket:
        limit = f" of {short_size(summary.fusion_bytes)} that fusion allows" if summary.fusion_bytes else ""
        said.append(
            f"An allreduce's bucket holds {summary.tensors_a_bucket:.1f} tensors, {short_size(summary.bytes_a_bucket)}{limit}."
        )
    late = max(summary.ranks, key=lambda row: row.last * row.late_ms, default=None)
    whole = sum(row.last for row in summary.ranks)
    if late is not None and whole and len(summary.ranks) > 1:
        said.append(
            f"Rank {late.rank} delays the others most: it comes last to {late.last / whole:.0%} of the buckets, "
            f"{late.late_ms:.3f} ms after the others (median)."
        )
    said += _clocks(summary)
    cut = [str(row.rank) for row in summary.ranks if not row.complete]
    if cut:
        said.append(f"The file of rank {', '.join(cut)} is incomplete: the rank was killed, or it is still running.")
    return said


def _clocks(summary: Summary) -> list[str]:
    unknown = [str(row.rank) for row in summary.ranks if row.error_us is None]
    if len(summary.ranks) < 2:
        return []
    if unknown:
        return [
            f"The clock of rank {', '.join(unknown)} was not compared with the other clocks, because its file ends too early. "
            "Which rank comes last, and how late, may be wrong by their difference."
        ]
    error_us = sum(sorted(row.error_us or 0.0 for row in summary.ranks)[-2:])
    if any(row.offset_us for row in summary.ranks):
        return [f"The clocks of any two ranks agree to {error_us:.1f} µs."]
    return [
        f"All ranks use the same clock. The times that two ranks note for one event differ by at most {error_us:.1f} µs."
    ]


def tables(summary: Summary) -> list[Table]:
    """Return the results of ``summary`` as tables, for a terminal and for the page."""
    whole = sum(row.last for row in summary.ranks) or 1
    found: list[Table] = [
        (
            "Ranks",
            ["rank", "host", "steps", "step ms", "exposed", "communication", "overlap", "last to", "late ms"],
            [
                [
                    str(row.rank), plain(row.host), str(row.steps), f"{row.step_ms:.2f}", f"{row.exposed:.1%}", f"{row.communication:.1%}",
                    f"{row.overlap:.0%}", f"{row.last / whole:.0%}", f"{row.late_ms:.3f}",
                ]
                for row in summary.ranks
            ],
        ),
        (
            "Buckets by their time on the wire",
            ["bucket", "operation", "count", "tensors", "size", "wire ms", "share"],
            [
                [
                    plain(row.names), plain(row.kind.lower()), str(row.count), str(row.tensors), short_size(row.nbytes),
                    f"{row.wire_ms:.3f}", f"{row.share:.1%}",
                ]
                for row in summary.buckets
            ],
        ),
    ]  # fmt: skip
    if summary.tensors:
        rows = [[plain(row.name), str(row.count), f"{row.held_ms:.3f}"] for row in summary.tensors]
        found.append(
            ("Tensors that their bucket waited for", ["tensor", "times last", "ms behind the one before"], rows)
        )
    return found


def page(name: str, summary: Summary, metadata: Mapping[str, Any], events: Sequence[Event]) -> str:
    """Return the HTML page for the trace called ``name``, which has these ``metadata`` and ``events``."""
    name = plain(name)
    parts = [html.element("h1", f"Timeline {name}"), *(html.element("p", text) for text in sentences(summary))]
    for title, svg in charts(summary, events).items():
        parts.append(f"{html.element('h2', title)}\n{svg}")
    for title, head, rows in tables(summary):
        parts.append(f"{html.element('h2', title)}\n{html.table(head, rows)}")
    said: list[Event] = metadata.get("ranks", [])
    version = html.escaped(plain(str(said[0].get("ddl", ""))) if said else "")
    parts.append(f"<p><small>ddl {version}. The trace itself opens in ui.perfetto.dev.</small></p>")
    return html.page(name, parts)


def charts(summary: Summary, events: Sequence[Event]) -> dict[str, str]:
    """Return the charts by title, each as SVG."""
    found = {"Where a step's time goes": _shares(summary)}
    runs = runs_of(events)
    step = _median_step(runs)
    if step:
        waits = [event for event in events if event.get("name") == "WAIT"]
        found["One step, that of median length"] = _step(summary, runs, waits, step)
    if len(summary.ranks) > 1:
        found["Who comes last"] = _stragglers(summary)
    return found


# --- charts


def _shares(summary: Summary) -> str:
    rows = summary.ranks[:SHOWN_RANKS]
    longest = max((row.step_ms for row in rows), default=1.0) or 1.0
    scale = (WIDTH - LEFT - 120) / longest
    shapes = []
    for i, row in enumerate(rows):
        y = 34 + i * ROW
        exposed, own = row.exposed * row.step_ms * scale, (1 - row.exposed) * row.step_ms * scale
        hidden = row.overlap * row.communication * row.step_ms * scale
        shapes += [
            _text(LEFT - 8, y + 12, f"rank {row.rank}", "end"),
            _rect(LEFT, y, own, BAR, COMPUTE, f"own work {row.step_ms * (1 - row.exposed):.2f} ms"),
            _rect(LEFT + own, y, exposed, BAR, EXPOSED, f"waiting in ddl {row.step_ms * row.exposed:.2f} ms"),
            _rect(
                LEFT + max(own - hidden, 0), y + BAR - 4, min(hidden, own), 4, HIDDEN, "communication behind own work"
            ),
            _text(LEFT + own + exposed + 6, y + 12, f"{row.step_ms:.2f} ms, {row.exposed:.1%}"),
        ]
    key = _key([(COMPUTE, "own work"), (EXPOSED, "waiting in ddl"), (HIDDEN, "communication behind own work")])
    return _svg(40 + ROW * len(rows), [key, *shapes, _left_out(summary, 38 + ROW * len(rows))])


def _stragglers(summary: Summary) -> str:
    rows = summary.ranks[:SHOWN_RANKS]
    whole = sum(row.last for row in summary.ranks) or 1
    most = max((row.last for row in rows), default=1) or 1
    shapes = []
    for i, row in enumerate(rows):
        y = 8 + i * ROW
        width = (WIDTH - LEFT - 240) * row.last / most
        label = f"{row.last / whole:.0%} of buckets, {row.late_ms:.3f} ms behind" if row.last else "never"
        shapes += [
            _text(LEFT - 8, y + 12, f"rank {row.rank}", "end"),
            _rect(LEFT, y, width, BAR, NEGOTIATE, label),
            _text(LEFT + width + 6, y + 12, label),
        ]
    return _svg(16 + ROW * len(rows), shapes)


def _median_step(runs: Sequence[Run]) -> tuple[float, float] | None:
    """Return begin and end of the step of median length on the first rank; None if no whole step was replayed.

    A step begins at the end of the previous one.
    """
    first = min((run.pid for run in runs), default=0)
    ends: dict[Any, float] = {}
    for run in runs:
        if run.pid == first and run.step is not None:
            ends[run.step] = max(ends.get(run.step, 0.0), run.ended)
    spans = [
        (ends[before], end)
        for (epoch, number, period), end in ends.items()
        if (before := (epoch, number, period - 1)) in ends
    ]
    spans.sort(key=lambda span: span[1] - span[0])
    return spans[len(spans) // 2] if spans else None


def _step(summary: Summary, runs: Sequence[Run], waits: Iterable[Event], span: tuple[float, float]) -> str:
    rows = {row.pid: i for i, row in enumerate(summary.ranks[:SHOWN_RANKS])}
    begin, end = span
    scale = (WIDTH - LEFT - 20) / max(end - begin, 1e-3)
    height = 40  # of the row of a rank: its waits above, its buckets below
    shapes = []
    for row in summary.ranks[:SHOWN_RANKS]:
        y = 34 + rows[row.pid] * height
        shapes += [
            _text(LEFT - 8, y + 18, f"rank {row.rank}", "end"),
            _rect(LEFT, y, WIDTH - LEFT - 20, 28, "#f3f5f7", ""),
        ]

    def put(pid: int, since: float, until: float, dy: int, tall: int, colour: str, title: str) -> None:
        since, until = max(since, begin), min(until, end)
        if pid in rows and until > since:
            y = 34 + rows[pid] * height + dy
            shapes.append(
                _rect(LEFT + (since - begin) * scale, y, max((until - since) * scale, 0.6), tall, colour, title)
            )

    for event in waits:
        put(event["pid"], event["ts"], event["ts"] + event["dur"], 2, 8, EXPOSED, f"wait {event['dur'] / 1000:.3f} ms")
    for run in runs:
        if run.ended <= begin or run.begun >= end:
            continue
        title = f"{run.kind} {', '.join(run.args['names'][:3])}: {run.args['tensors']} tensors, {short_size(run.args['nbytes'])}"
        put(run.pid, run.begun, run.ended, 14, 12, HIDDEN, title)
        put(run.pid, run.begun, run.begun + run.copied_in, 14, 12, COPY, "copy in")
        put(run.pid, run.ended - run.copied_out, run.ended, 14, 12, COPY, "copy out")
    bottom = 34 + height * len(rows)
    axis = [_text(LEFT, bottom + 10, "0"), _text(WIDTH - 20, bottom + 10, f"{(end - begin) / 1000:.2f} ms", "end")]
    key = _key([(EXPOSED, "waiting in ddl"), (HIDDEN, "bucket under way"), (COPY, "copies of the fusion buffer")])
    return _svg(bottom + 18, [key, *shapes, *axis])


def _svg(height: float, shapes: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
        f'font-family="sans-serif" font-size="12">\n' + "\n".join(shape for shape in shapes if shape) + "\n</svg>"
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    told = html.element("title", title) if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height}" fill="{colour}">{told}</rect>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222">{html.escaped(text)}</text>'


def _key(colours: Sequence[tuple[str, str]]) -> str:
    shapes, x = [], float(LEFT)
    for colour, label in colours:
        shapes += [_rect(x, 6, 12, 12, colour, ""), _text(x + 18, 16, label)]
        x += 40 + 6.6 * len(label)
    return "".join(shapes)


def _left_out(summary: Summary, y: float) -> str:
    more = len(summary.ranks) - SHOWN_RANKS
    return _text(LEFT, y, f"… and {more} ranks more, in the table") if more > 0 else ""
