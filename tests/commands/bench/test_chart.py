"""The chart: a file comes out, or a line that says why not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddlcore.commands.bench.chart import draw, require_matplotlib
from ddlcore.commands.bench.results import TRANSPORT, WHOLE, Row


def test_a_file_comes_out(tmp_path: Path) -> None:
    """With a peer that lacks a size, and a single round."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the chart")
    rows = [
        Row("allreduce", 4, {TRANSPORT: [1e-6], WHOLE: [5e-5], "pigeon": [2e-4]}),
        Row("allreduce", 1 << 20, {TRANSPORT: [1e-4, 2e-4, 3e-4], WHOLE: [2e-4] * 3}),
        Row("alltoall", 4, {TRANSPORT: [1e-6] * 3, WHOLE: [5e-5] * 3}),
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
