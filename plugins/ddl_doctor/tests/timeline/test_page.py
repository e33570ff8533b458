"""The page of a timeline: the step that is drawn, and what its charts say."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ddl_doctor.timeline.charts import SHOWN_RANKS, charts
from ddl_doctor.timeline.page import page
from ddl_doctor.timeline.summary import Summary, runs_of, summarise, waits_of
from ddl_doctor.timeline.typical import ALIKE, TypicalStep, typical_step

Event = dict[str, Any]


def trace(
    steps: list[tuple[float, list[float]]], names: tuple[str, ...] = ("a",)
) -> tuple[dict[str, Any], list[Event]]:
    """Return the metadata and events of steps, each given by its length and by what each rank waits in it, in µs."""
    events, end = list[Event](), 1000.0
    ranks = len(steps[0][1])
    for period, (length, waits) in enumerate([(100.0, [10.0] * ranks), *steps]):
        end += length
        for pid, wait in enumerate(waits):
            args = {
                "bucket": f"e1.p{period}", "period": period, "schedule": 0, "position": 0, "set": 0, "tensors": 1, "nbytes": 4096,
                "names": list(names), "ready_us": [0.0], "entered_us": 0.0,
            }  # fmt: skip
            place = {"ph": "X", "pid": pid, "ts": end - wait, "dur": wait}
            events.append({"name": "ALLREDUCE", "tid": 10, "args": args, **place})
            events.append({"name": "SHM_ALLREDUCE", "tid": 10, **place})
            events.append({"name": "WAIT", "tid": 1, **place})
    said = [
        {"pid": pid, "rank": pid, "host": "h", "clock_offset_us": 0.0, "clock_error_us": 1.0} for pid in range(ranks)
    ]
    return {"ranks": said}, events


def drawn(events: list[Event], summary: Summary) -> TypicalStep:
    step = typical_step(summary, runs_of(events), waits_of(events))
    assert step is not None
    return step


# Long steps of which much is exposed, and steps of median length of which little is: a late rank makes both grow.
UNEVEN = [(1000.0, [150.0, 150.0])] * 3 + [(900.0, [360.0, 216.0])] * 4 + [(1500.0, [900.0, 880.0])] * 3


def test_the_step_that_is_drawn_has_the_share_of_the_headline() -> None:
    """Not the step of median length: of that one, 15 % is exposed, and of all steps 32 %."""
    metadata, events = trace(UNEVEN)
    summary = summarise(metadata, events)
    step = drawn(events, summary)
    assert summary.exposed == pytest.approx(0.32)
    assert step.exposed == pytest.approx(summary.exposed, abs=ALIKE)
    assert (step.number, step.count) == (4, 10)
    assert step.end - step.begin == pytest.approx(900)


def test_the_page_says_which_step_is_drawn_and_its_share() -> None:
    """The same share as in its first sentence, which the bars of the step have, too."""
    metadata, events = trace(UNEVEN)
    text = page("t.json", summarise(metadata, events), metadata, events)
    headline = re.search(r"<p>([\d.]+)% of a step", text)
    caption = re.search(r"Step 4 of the 10 that rank 0 ran from memory.*?: ([\d.]+)% of it is exposed", text)
    assert headline and caption
    assert float(caption[1]) == pytest.approx(float(headline[1]), abs=0.5)
    chart = text.partition("<h2>One step</h2>")[2].partition("</figure>")[0]
    widths = [float(width) for width in re.findall(r'<rect class="exposed"[^>]* width="([\d.]+)%"', chart)]
    assert len(widths) == 2
    assert sum(widths) / len(widths) == pytest.approx(float(headline[1]), abs=0.5)


def test_the_most_usual_of_the_steps_with_that_share() -> None:
    """Neither one whose ranks have changed their parts, nor a long one."""
    usual = (1000.0, [300.0, 100.0])
    metadata, events = trace([(3000.0, [900.0, 300.0]), (1000.0, [100.0, 300.0]), usual, usual, usual, usual])
    step = drawn(events, summarise(metadata, events))
    assert step.number == 3


def test_no_step_has_the_share_of_all() -> None:
    """The nearest is drawn, and the page says that it is not the same."""
    metadata, events = trace([(1000.0, [100.0]), (1000.0, [800.0]), (1000.0, [190.0]), (1000.0, [700.0])])
    summary = summarise(metadata, events)
    assert drawn(events, summary).exposed == pytest.approx(0.19)
    assert "19.0% of it is exposed; no step is nearer to the 44.5% of all steps." in charts(summary, events)["One step"]


def test_without_replay_no_step_is_drawn() -> None:
    """The page says so; and a trace of nothing has no charts."""
    metadata, events = trace([(1000.0, [100.0])])
    for event in events:
        event.get("args", {}).pop("period", None)
    found = charts(summarise(metadata, events), events)
    assert found["One step"] == "<p>No whole step ran from memory on the first rank, so there is none to draw.</p>"
    assert charts(summarise({}, []), []) == {}


def test_axes_have_ticks_and_units() -> None:
    """Each chart has an axis with several labels, whose last one names the unit."""
    metadata, events = trace(UNEVEN)
    found = charts(summarise(metadata, events), events)
    assert list(found) == ["Where a step's time goes", "One step", "Who comes last"]
    for title, unit in zip(found, ("\N{NO-BREAK SPACE}ms", "\N{NO-BREAK SPACE}ms", "%")):
        (axis,) = re.findall(r'<svg class="axis".*?</svg>', found[title])
        labels = re.findall(r"<text[^>]*>([^<]*)</text>", axis)
        assert len(labels) >= 3 and labels[0] == "0" and labels[-1].endswith(unit), title


def test_the_first_ranks_of_many_are_drawn() -> None:
    """And the chart says that there are more."""
    metadata, events = trace([(1000.0, [100.0] * (SHOWN_RANKS + 8))] * 2)
    found = charts(summarise(metadata, events), events)
    for chart in found.values():
        assert "The first 32 of 40 ranks are drawn" in chart
        assert "rank 31<" in chart and "rank 32<" not in chart


def test_a_tensor_of_any_name_is_drawn() -> None:
    """As text; half a surrogate pair cannot be written to a file."""
    metadata, events = trace([(1000.0, [100.0])] * 2, ("<script>\ud800",))
    text = page("t", summarise(metadata, events), metadata, events)
    assert "&lt;script&gt;\\ud800" in text
    text.encode()
