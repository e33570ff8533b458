"""The chart: a file comes out, or a line that says why not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ddl_doctor.bench.chart import draw, require_matplotlib
from ddl_doctor.bench.results import TRANSPORT, WHOLE, MeasuredRow

from tests.tiers import long

FEW = (("allreduce", "alltoall"), (4, 1 << 10, 1 << 20), ["4 B", "1 KiB", "1 MiB"])
ALL = (
    ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall"),
    (4, 64, 1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26),
    ["4 B", "64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB"],
)


def test_a_file_comes_out(tmp_path: Path) -> None:
    """With a peer that lacks a size, and a single round."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the chart")
    rows = [
        MeasuredRow("allreduce", 4, {TRANSPORT: [1e-6], WHOLE: [5e-5], "pigeon": [2e-4]}),
        MeasuredRow("allreduce", 1 << 20, {TRANSPORT: [1e-4, 2e-4, 3e-4], WHOLE: [2e-4] * 3}),
        MeasuredRow("alltoall", 4, {TRANSPORT: [1e-6] * 3, WHOLE: [5e-5] * 3}),
    ]
    path = tmp_path / "chart.svg"
    require_matplotlib(path)
    draw(path, rows, "shm", "2 ranks")
    assert path.stat().st_size > 5000
    assert "</svg>" in path.read_text()


def test_an_ending_that_is_none(tmp_path: Path) -> None:
    """Refused before anything is measured."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the chart")
    with pytest.raises(ValueError, match=r"must end in one of \.\w+, .*\.svg"):
        require_matplotlib(tmp_path / "chart.doc")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ValueError, match="--plot needs matplotlib; pip install matplotlib"):
        require_matplotlib(tmp_path / "chart.png")


@pytest.mark.parametrize(("operations", "sizes", "labels"), [FEW, *long(ALL)], ids=["few", "all"])
def test_axes_have_titles_with_units(
    operations: tuple[str, ...],
    sizes: tuple[int, ...],
    labels: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every panel, all on one scale, and the legend has a peer that lacks the first operation.

    Five operations are in two rows, and only they are saved as a picture.
    """
    pytest.importorskip("matplotlib", reason="matplotlib draws the chart")
    from matplotlib.figure import Figure

    kept: list[Figure] = []
    save = Figure.savefig

    def savefig(figure: Figure, *given: Any, **more: Any) -> None:
        if operations == ALL[0]:
            save(figure, *given, **more)
        kept.append(figure)

    monkeypatch.setattr(Figure, "savefig", savefig)
    rows = []
    for i, operation in enumerate(operations):
        for nbytes in sizes:
            peer = {"pigeon": [2e-4 * (i + 1)]} if i else {}
            ours = {TRANSPORT: [1e-6 * (i + 1) * (1 + nbytes / 1e4)], WHOLE: [(i + 1) * (5e-5 + nbytes / 1e9)]}
            rows.append(MeasuredRow(operation, nbytes, {**ours, **peer}))
    draw(tmp_path / "chart.png", rows, "shm", "2 ranks, $5")
    (figure,) = kept
    panels = [panel for panel in figure.axes if panel.axison]
    assert [panel.get_title() for panel in panels if panel.get_title()] == list(operations)
    times = [panel for panel in panels if panel.get_title()]
    rates = [panel for panel in panels if not panel.get_title()]
    assert len(times) == len(rates) == len(operations)
    assert {panel.get_ylabel() for panel in times} == {"time of a call (µs)"}
    assert {panel.get_ylabel() for panel in rates} == {"bytes of the tensor per second (GB/s)"}
    assert {panel.get_xlabel() for panel in rates} == {"size of the whole tensor (bytes)"}
    assert len({panel.get_ylim() for panel in times}) == len({panel.get_ylim() for panel in rates}) == 1
    assert [label.get_text() for label in rates[0].get_xticklabels()] == labels
    low, high = times[0].get_ylim()
    assert len([tick for tick in times[0].get_yticks() if low <= tick <= high]) >= 3
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["shm, alone", "ddl, whole call", "pigeon"]
    assert len({line.get_marker() for line in times[1].get_lines()}) == 3, "told apart without colours"
