"""Format the summary of a trace as sentences, as tables, and as one self-contained HTML page. Computes no results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ddl_doctor.sizes import short_size
from ddl_doctor.timeline.charts import STYLE, charts
from ddl_doctor.timeline.summary import Summary, WorldRow
from ddlcore.text import html
from ddlcore.text.plain import plain
from ddlcore.text.ranks import span

Event = dict[str, Any]
Table = tuple[str, list[str], list[list[str]]]  # title, head, rows


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
    said += _worlds(summary)
    said += _clocks(summary)
    cut = [str(row.rank) for row in summary.ranks if not row.complete]
    if cut:
        said.append(f"The file of rank {', '.join(cut)} is incomplete: the rank was killed, or it is still running.")
    return said


def _worlds(summary: Summary) -> list[str]:
    if len(summary.worlds) < 2:
        return []
    lost = sum(len(one.lost) for one in summary.worlds)
    joined = sum(len(one.joined) for one in summary.worlds)
    again, still_s = sum(one.recomputed for one in summary.worlds), sum(one.still_s for one in summary.worlds)
    return [
        f"The job had {len(summary.worlds)} worlds (ranks lost: {lost}, joined: {joined}): the training stood still for "
        f"{still_s:.2f} s, and {again} {'step was' if again == 1 else 'steps were'} computed again."
    ]


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
    if len(summary.worlds) > 1:
        head = ["world", "begins at s", "ranks", "lost", "joined", "left", "steps again", "stood still s"]
        found.insert(0, ("Worlds", head, [_world_cells(one) for one in summary.worlds]))
    if summary.tensors:
        rows = [[plain(row.name), str(row.count), f"{row.held_ms:.3f}"] for row in summary.tensors]
        found.append(
            ("Tensors that their bucket waited for", ["tensor", "times last", "ms behind the one before"], rows)
        )
    return found


def _world_cells(row: WorldRow) -> list[str]:
    who = [span(ranks, ", ") for ranks in (row.lost, row.joined, row.left)]
    return [
        str(row.generation),
        f"{row.at_s:.2f}",
        str(row.size),
        *who,
        str(row.recomputed or ""),
        f"{row.still_s:.2f}",
    ]


def page(name: str, summary: Summary, metadata: Mapping[str, Any], events: Sequence[Event]) -> str:
    """Return the HTML page about the trace in the file ``name``.

    ``metadata`` and ``events`` are the content of the trace, and ``summary`` was computed from them.
    """
    name = plain(name)
    parts = [html.element("h1", f"Timeline {name}")]
    parts += [html.element("p", html.unbroken(text)) for text in sentences(summary)]
    for title, chart in charts(summary, events).items():
        parts.append(f"{html.element('h2', title)}\n{chart}")
    for title, head, rows in tables(summary):
        parts.append(f"{html.element('h2', title)}\n{html.table(head, rows)}")
    said: list[Event] = metadata.get("ranks", [])
    version = plain(str(said[0].get("ddl", ""))) if said else ""
    written = f"Written by ddl {version}. " if version else ""
    parts.append(f"<p>{html.element('small', f'{written}The trace itself opens in ui.perfetto.dev.')}</p>")
    return html.page(name, parts, STYLE)
