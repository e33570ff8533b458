"""The training benchmark judges and shows what was measured as it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.training.chart import draw
from tools.training.contenders import Measured
from tools.training.report import (
    Spread,
    aligned,
    efficiency,
    exposed_table,
    markdown,
    missed,
    ratio_rows,
    ratio_table,
    refreshed,
    section,
    speed_table,
    spread,
    verdict,
)

ROUNDS = 15
NOISE = [1.0 + 0.001 * (i % 5) for i in range(ROUNDS)]


def measured(
    model: str = "wide", ranks: int = 2, none: float = 1.0, barrier: float = 1.0, ddp: float = 2.0
) -> Measured:
    """A run in which ddl takes 1 s a step (all contenders swell alike in some rounds), and the others what is given."""
    step_s = {"none": none, "barrier": barrier, "ddp": ddp, "ddl": 1.0}
    times = {name: [value * noise for noise in NOISE] for name, value in step_s.items()}
    return Measured(model, ranks, 8, 33_000_000, 8, 2, times, control_messages=0.0, replayed=4.0, divergences=0)


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(1, 0, 0), (2, 0, 1), (5, 0, 4), (6, 0, 5), (9, 1, 7), (15, 3, 11), (25, 7, 17)],
)
def test_the_interval_is_the_published_one(count: int, low: int, high: int) -> None:
    """Order statistics of the usual tables for 95 % (n = 9: 2nd and 8th, n = 15: 4th and 12th, n = 25: 8th and 18th)."""
    values = [float(value) for value in reversed(range(count))]
    assert spread(values) == Spread(float(low), (count - 1) / 2, float(high))


@pytest.mark.parametrize(
    ("low", "median", "expected"), [(0.9, 1.0, "holds"), (0.9, 1.01, "within spread"), (1.01, 1.02, "misses")]
)
def test_a_target_is_missed_by_the_whole_interval_only(low: float, median: float, expected: str) -> None:
    """The median decides what holds, the lower end what misses."""
    assert verdict(Spread(low, median, 1.1), 1.0) == expected


def verdicts(run: Measured) -> dict[str, str]:
    return {row.over: row.verdict for row in ratio_rows(run)}


def test_ratios_are_taken_within_a_round() -> None:
    """What slows a round down for all of them leaves no trace."""
    rows = {row.over: row.spread for row in ratio_rows(measured(none=0.8, ddp=1.6))}
    assert rows["ddl / none"].low == pytest.approx(1.25) and rows["ddl / none"].high == pytest.approx(1.25)
    assert rows["ddp / none"].median == pytest.approx(2.0) and rows["ddl / ddp"].median == pytest.approx(0.625)


def test_what_a_timeline_shows_stands_beside_what_the_times_say() -> None:
    """What was waited, and the share that a step alone does not take; without a timeline, no line and no table."""
    bare = measured(none=0.8)
    ours = replace(bare, exposed=0.17, waiting=0.15)
    (line, other) = exposed_table([bare, ours, replace(bare, exposed=0.17)])[1:]
    assert line == ["wide", "2", "0.150", "0.170", "+0.020", "0.200", "[0.200, 0.200]"]
    assert other == ["wide", "2", "", "0.170", "", "0.200", "[0.200, 0.200]"]
    assert "by the timeline" not in section([bare], "command", "machine")
    assert "| wide | 2 | 0.150 |" in section([ours], "command", "machine")


def test_either_of_two_targets_is_enough() -> None:
    """1.25 over none holds, or 1.10 over the barrier does; else both rows miss."""
    over_both = verdicts(measured(none=0.7, barrier=0.8))
    assert (over_both["ddl / none"], over_both["ddl / barrier"]) == ("misses", "misses")
    by_barrier = verdicts(measured(none=0.7, barrier=0.95))
    assert (by_barrier["ddl / none"], by_barrier["ddl / barrier"]) == ("holds", "holds")
    by_none = verdicts(measured(none=0.9, barrier=0.8))
    assert (by_none["ddl / none"], by_none["ddl / barrier"]) == ("holds", "holds")


def test_a_miss_fails_the_run_on_two_ranks_only() -> None:
    """Slower than DDP: missed. On one or four ranks there is nothing to miss, and no target is shown."""
    assert missed(ratio_rows(measured(ddp=1.0)))
    assert not missed(ratio_rows(measured(ddp=2.0)))
    for ranks in (1, 4):
        rows = ratio_rows(measured(ranks=ranks, none=0.1, ddp=0.1))
        assert not missed(rows) and not any(row.verdict for row in rows)
        assert "<=" not in aligned(ratio_table(rows))


def test_speeds_are_of_all_ranks() -> None:
    """8 samples a rank and second of step time are 16 samples a second on two; counts stand at ddl alone."""
    head, *lines = speed_table([measured(none=0.5)])
    by_contender = {line[1]: dict(zip(head, line)) for line in lines}
    assert by_contender["ddl"]["samples/s"] == f"{16 / 1.002:.1f}"
    assert by_contender["ddl"]["efficiency"] == "50%" and by_contender["none"]["efficiency"] == "100%"
    assert by_contender["ddl"]["messages"] == "0" and by_contender["ddp"]["messages"] == ""
    assert efficiency(measured(none=0.5), "ddp").median == pytest.approx(0.25)


def test_text_stands_in_columns() -> None:
    """Names to the left, numbers to the right, no blanks at the end."""
    table = [["model", "step time", "median"], ["gpt", "ddl / none", "1.1"], ["resnet", "ddp / none", "12.05"]]
    assert aligned(table).splitlines() == [
        "model   step time   median",
        "gpt     ddl / none     1.1",
        "resnet  ddp / none   12.05",
    ]
    assert markdown(table).splitlines()[1] == "| --- | --- | ---: |"


def test_a_document_keeps_what_is_around_the_marks() -> None:
    """A section is put in once, replaced the next time, and appended where there are no marks."""
    first = refreshed("# Title\n", "one")
    assert first == "# Title\n\n<!-- training: begin -->\none\n<!-- training: end -->\n"
    assert refreshed(first + "\nafter\n", "two") == first.replace("one", "two") + "\nafter\n"
    assert refreshed("", "one").startswith("<!-- training: begin -->")


def test_a_section_names_command_machine_and_every_number_of_ranks() -> None:
    """Two runs on 2 ranks and one on 1: two headings, each with its own rows."""
    text = section([measured(), measured("gpt"), measured(ranks=1)], "python x", "a machine")
    assert text.startswith("`python x`, on a machine:")
    assert text.count("**2 ranks**") == 1 and text.count("**1 rank**") == 1
    assert text.count("| gpt | ddl / ddp |") == 1


def test_the_same_numbers_draw_the_same_file(tmp_path: Path) -> None:
    """Bars for each model, a panel for each number of ranks, no date in it."""
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    runs = [measured(), measured("gpt"), measured(ranks=4)]
    for name in ("a.svg", "b.svg"):
        draw(runs, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert "<!-- 4 ranks -->" in drawn and "<!-- gpt -->" in drawn


def test_each_framework_has_its_own_peer_and_targets() -> None:
    """TensorFlow's is held to MultiWorkerMirroredStrategy, without the barrier's way out, and to no message in replay."""
    times = {"none": 1.0, "barrier": 1.0, "mwms": 3.0, "ddl": 1.0}
    seconds = {name: [value * noise for noise in NOISE] for name, value in times.items()}
    verdicts = {}
    for messages, left in ((0.0, 0), (2.0, 0), (2.0, 1)):
        run = Measured("wide", 2, 8, 33_000_000, 8, 2, seconds, messages, 1.0, left, framework="tf")
        verdicts[messages, left] = {row.over: row.verdict for row in ratio_rows(run)}
    assert verdicts[0.0, 0]["ddl / mwms"] == "holds" and verdicts[0.0, 0]["ddl / barrier"] == ""
    of_messages = [found["ddl's control messages"] for found in verdicts.values()]
    assert of_messages == ["holds", "misses", "within spread"]
