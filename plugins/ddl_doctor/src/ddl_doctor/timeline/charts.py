"""Draw the charts of a timeline's page. A chart is HTML whose bars are SVG with coordinates in percent.

Because of the percentages, a chart fills any width, and its text has the size of the page's other text, also on a
phone. This module computes no results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from ddl_doctor.sizes import short_size
from ddl_doctor.ticks import linear_ticks
from ddl_doctor.timeline.summary import BucketRun, Summary, runs_of, waits_of
from ddl_doctor.timeline.typical import ALIKE, TypicalStep, typical_step
from ddlcore.text import html
from ddlcore.text.plain import plain

Event = dict[str, Any]

SHOWN_RANKS = 32  # a chart shows at most so many ranks
BAR, TALL, AXIS = 16, 30, 22  # heights in pixels: of a bar, of a rank's row in a step, of an axis
_LEAST = 0.1  # percent of the width: a bucket that is too short to be seen is drawn that wide
# The colours of Okabe and Ito (2008), which people with any kind of colour blindness can tell apart. The position also
# shows the meaning: waits are above buckets, and hidden communication is at the bottom of the bar of own work.
STYLE = """
:root { --own: #b8c4d0; --exposed: #d55e00; --communication: #0072b2; --copies: #e69f00; --last: #7a5195; }
@media (prefers-color-scheme: dark) {
  :root { --own: #4b5866; --exposed: #f08a3c; --communication: #56b4e9; --copies: #f0d35c; --last: #b99ad6; }
}
figure { margin: 0; }
.key { display: flex; flex-wrap: wrap; gap: .2em 1.4em; margin: 0 0 .6em; font-size: .93em; }
.key i { display: inline-block; width: .85em; height: .85em; margin-right: .45em; vertical-align: -.08em; }
.chart { display: grid; grid-template-columns: max-content minmax(0, 1fr) max-content; gap: .45em .8em; align-items: center; }
.row { display: contents; }
.row span { white-space: nowrap; font-variant-numeric: tabular-nums; font-size: .93em; }
.chart svg { display: block; width: 100%; overflow: visible; }
.axis text { fill: var(--faint); font-size: 12px; } .grid { stroke: var(--line); stroke-width: 1; }
.track { fill: var(--track); } .own { fill: var(--own); background: var(--own); }
.exposed { fill: var(--exposed); background: var(--exposed); } .copies { fill: var(--copies); background: var(--copies); }
.communication { fill: var(--communication); background: var(--communication); }
.last { fill: var(--last); background: var(--last); }
figcaption { margin-top: .6em; font-size: .93em; }
@media (max-width: 40em) {
  .chart { display: block; }
  .row { display: grid; grid-template-columns: 1fr max-content; gap: .15em .8em; margin-bottom: .55em; }
  .row svg { grid-row: 2; grid-column: 1 / -1; }
}
"""


def charts(summary: Summary, events: Sequence[Event]) -> dict[str, str]:
    """Return the charts by title, each as HTML that needs ``STYLE``.

    ``events`` are the events of the trace from which ``summary`` was computed.
    """
    if not summary.ranks:
        return {}
    found = {"Where a step's time goes": _shares(summary)}
    runs = runs_of(events)
    step = typical_step(summary, runs, waits_of(events))
    if step is None:
        none = "No whole step ran from memory on the first rank, so there is none to draw."
        found["One step"] = html.element("p", none)
    else:
        found["One step"] = _step(summary, runs, events, step)
    if len(summary.ranks) > 1:
        found["Who comes last"] = _stragglers(summary)
    return found


def _shares(summary: Summary) -> str:
    rows = summary.ranks[:SHOWN_RANKS]
    longest = max(row.step_ms for row in rows) or 1.0
    ticks = linear_ticks(longest)
    drawn = []
    for row in rows:
        own, exposed = (share * row.step_ms / longest * 100 for share in (1 - row.exposed, row.exposed))
        hidden = min(row.overlap * row.communication * row.step_ms / longest * 100, own)
        bars = [
            _rect(0, own, 0, BAR, "own", f"own work: {row.step_ms * (1 - row.exposed):.2f} ms"),
            _rect(own, exposed, 0, BAR, "exposed", f"waiting in ddl: {row.step_ms * row.exposed:.2f} ms"),
            _rect(own - hidden, hidden, BAR - 5, 5, "communication", "communication behind own work"),
        ]
        value = f"{row.step_ms:.2f} ms, {row.exposed:.1%} waiting"
        drawn.append(_row(f"rank {row.rank}", BAR, [*_grid(ticks, longest), *bars], value))
    drawn.append(_axis(ticks, longest, "\N{NO-BREAK SPACE}ms"))
    key = [("own", "own work"), ("exposed", "waiting in ddl"), ("communication", "communication behind own work")]
    said = (
        "Medians over the steps that ran from memory." if any(row.steps for row in rows) else "All that was recorded."
    )
    return _figure(key, drawn, said, len(summary.ranks))


def _step(summary: Summary, runs: Sequence[BucketRun], events: Iterable[Event], step: TypicalStep) -> str:
    shapes: dict[int, list[str]] = {row.pid: [] for row in summary.ranks[:SHOWN_RANKS]}
    length = step.end - step.begin
    ticks = linear_ticks(length / 1000)

    def put(pid: int, since: float, until: float, y: int, height: int, name: str, title: str) -> None:
        since, until = max(since, step.begin), min(until, step.end)
        if pid in shapes and until > since:
            width = max((until - since) / length * 100, _LEAST)
            shapes[pid].append(_rect((since - step.begin) / length * 100, width, y, height, name, title))

    for event in events:
        if event.get("name") == "WAIT":
            title = f"waiting in ddl: {event['dur'] / 1000:.3f} ms"
            put(event["pid"], event["ts"], event["ts"] + event["dur"], 2, 10, "exposed", title)
    for run in runs:
        names, tensors = ", ".join(run.args["names"][:3]), run.args["tensors"]
        title = f"{plain(run.kind)} {plain(names)}: {tensors} tensor{'s' * (tensors != 1)}, {short_size(run.args['nbytes'])}"
        put(run.pid, run.begun, run.ended, 15, 13, "communication", title)
        put(run.pid, run.begun, run.begun + run.copied_in, 15, 13, "copies", "copy into the fusion buffer")
        put(run.pid, run.ended - run.copied_out, run.ended, 15, 13, "copies", "copy out of the fusion buffer")
    drawn = []
    for row in summary.ranks[:SHOWN_RANKS]:
        track = [_rect(0, 100, 0, TALL, "track", ""), *_grid(ticks, length / 1000, TALL)]
        drawn.append(_row(f"rank {row.rank}", TALL, [*track, *shapes[row.pid]], ""))
    drawn.append(_axis(ticks, length / 1000, "\N{NO-BREAK SPACE}ms"))
    key = [("exposed", "waiting in ddl"), ("communication", "a bucket is running")]
    if any('class="copies"' in shape for shape in itertools.chain(*shapes.values())):
        key.append(("copies", "copies into and out of the fusion buffer"))
    said = (
        f"Step {step.number} of the {step.count} that rank {step.rank} ran from memory, {length / 1000:.2f} ms long. "
    )
    if abs(step.exposed - summary.exposed) <= ALIKE:
        said += f"It is a typical one: {step.exposed:.1%} of it is exposed; of all steps, {summary.exposed:.1%}."
    else:
        said += f"{step.exposed:.1%} of it is exposed; no step is nearer to the {summary.exposed:.1%} of all steps."
    return _figure(key, drawn, said, len(summary.ranks))


def _stragglers(summary: Summary) -> str:
    rows = summary.ranks[:SHOWN_RANKS]
    whole = sum(row.last for row in summary.ranks)
    if not whole:
        return html.element("p", "No bucket had several ranks, so none of them came last.")
    ticks = linear_ticks(100)
    drawn = []
    for row in rows:
        share = row.last / whole
        value = f"{share:.0%} of the buckets, by {row.late_ms:.3f} ms" if row.last else "never"
        bars = [_rect(0, 100, 0, BAR, "track", ""), *_grid(ticks, 100), _rect(0, share * 100, 0, BAR, "last", value)]
        drawn.append(_row(f"rank {row.rank}", BAR, bars, value))
    drawn.append(_axis(ticks, 100, "%"))
    said = "For how many buckets a rank came last, and by how much it came later than the median of the others."
    return _figure([], drawn, said, len(summary.ranks))


# --- parts of a chart


def _figure(key: Sequence[tuple[str, str]], rows: Iterable[str], said: str, ranks: int) -> str:
    """Return a whole chart as HTML: a key of the colours, the rows, and a caption.

    ``key`` holds the CSS class and the meaning of each colour, ``said`` is the caption, and ``ranks`` is the number of
    all ranks.
    """
    shown = "".join(f'<span><i class="{name}"></i>{html.escaped(label)}</span>' for name, label in key)
    if ranks > SHOWN_RANKS:
        said += f" The first {SHOWN_RANKS} of {ranks} ranks are drawn; the table below has all of them."
    return (
        "<figure>"
        + (f'<div class="key">{shown}</div>' if key else "")
        + '<div class="chart">\n'
        + "\n".join(rows)
        + f"\n</div>{html.element('figcaption', html.unbroken(said))}</figure>"
    )


def _row(label: str, height: int, shapes: Iterable[str], value: str) -> str:
    bars = f'<svg height="{height}" aria-hidden="true">{"".join(shapes)}</svg>'
    return f'<div class="row">{html.element("span", label)}{bars}{html.element("span", html.unbroken(value))}</div>'


def _axis(ticks: Sequence[float], whole: float, unit: str) -> str:
    """Return the row of an axis from 0 to ``whole``, with labels at ``ticks``. The last label also has the unit."""
    labels = []
    for tick in ticks:
        at = tick / whole * 100
        label = f"{tick:g}{unit if tick == ticks[-1] else ''}"
        anchor = "start" if at < 2 else "end" if at > 94 else "middle"
        labels.append(f'<text x="{at:.2f}%" y="12" text-anchor="{anchor}">{label}</text>')
    axis = f'<svg class="axis" height="{AXIS}">{"".join(labels)}</svg>'
    return f'<div class="row"><span></span>{axis}<span></span></div>'


def _grid(ticks: Sequence[float], whole: float, height: int = BAR) -> list[str]:
    places = [tick / whole * 100 for tick in ticks]
    return [f'<line class="grid" x1="{at:.2f}%" x2="{at:.2f}%" y1="-4" y2="{height + 4}"/>' for at in places if at > 0]


def _rect(x: float, width: float, y: int, height: int, name: str, title: str) -> str:
    """Return an SVG rectangle of the CSS class ``name``.

    ``x`` and ``width`` are in percent, ``y`` and ``height`` in pixels. A browser shows ``title`` when the mouse pointer
    is on the rectangle; "" means no text.
    """
    told = html.element("title", title) if title else ""
    place = f'x="{x:.2f}%" y="{y}" width="{max(width, 0):.2f}%" height="{height}"'
    return f'<rect class="{name}" {place}>{told}</rect>'
