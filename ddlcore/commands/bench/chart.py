"""Draw results with matplotlib into a file. No other module of this package draws."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ddlcore.commands.bench.results import TRANSPORT, WHOLE, Row
from ddlcore.text.numbers import exact_size


def require_matplotlib(path: Path) -> None:
    """Raise ValueError, with a message of one line, if no chart can be drawn to ``path``."""
    try:
        backend = import_module("matplotlib.backends.backend_agg")
    except ImportError:
        raise ValueError("--plot needs matplotlib; pip install matplotlib") from None
    known = backend.FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise ValueError(f"--plot {path}: the name must end in one of .{', .'.join(sorted(known))}")


def draw(path: Path, rows: Sequence[Row], transport: str, title: str) -> None:
    """Draw time and rate against size into the file ``path``, with a column of panels for each operation.

    The bands show the quartiles over the rounds.
    """
    figure_class = import_module("matplotlib.figure").Figure
    operations = list(dict.fromkeys(row.operation for row in rows))
    figure = figure_class(figsize=(1.5 + 3.9 * len(operations), 7.2), layout="constrained")
    panels = figure.subplots(2, len(operations), squeeze=False, sharex="col", sharey="row")
    names = list(dict.fromkeys(name for row in rows for name in row.times))
    for column, operation in enumerate(operations):
        here = [row for row in rows if row.operation == operation]
        for number, name in enumerate(names):
            own = [row for row in here if name in row.times]
            if own:
                _plot(panels[0][column], panels[1][column], own, name, f"C{number}", _label(name, transport))
        _label_axes(panels[0][column], panels[1][column], operation, [row.nbytes for row in here])
    panels[0][0].set_ylabel("time of a call, µs")
    panels[1][0].set_ylabel("GB/s of the tensor")
    panels[1][0].set_ylim(bottom=0)  # after all lines are drawn, because the panels of the row share the axis
    panels[0][0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _plot(times: Any, rates: Any, rows: Sequence[Row], name: str, colour: str, label: str) -> None:
    sizes = [row.nbytes for row in rows]
    bands = [
        statistics.quantiles(row.times[name], n=4, method="inclusive") if len(row.times[name]) > 1 else None
        for row in rows
    ]
    quartiles = [band or [row.median_s(name)] * 3 for band, row in zip(bands, rows)]
    low, middle, high = ([band[part] for band in quartiles] for part in range(3))
    times.plot(sizes, [value * 1e6 for value in middle], "o-", color=colour, label=label, markersize=4)
    times.fill_between(sizes, [value * 1e6 for value in low], [v * 1e6 for v in high], color=colour, alpha=0.2, lw=0)
    rates.plot(sizes, [n / s / 1e9 for n, s in zip(sizes, middle)], "o-", color=colour, markersize=4)
    rates.fill_between(
        sizes,
        [n / s / 1e9 for n, s in zip(sizes, high)],
        [n / s / 1e9 for n, s in zip(sizes, low)],
        color=colour,
        alpha=0.2,
        lw=0,
    )


def _label(name: str, transport: str) -> str:
    return {TRANSPORT: f"{transport}, alone", WHOLE: "ddl, whole call"}.get(name, name)


def _label_axes(times: Any, rates: Any, operation: str, sizes: Sequence[int]) -> None:
    times.set(title=operation, yscale="log")
    rates.set(xscale="log")
    shown = list(sizes)[:: max(1, round(len(sizes) / 5))]
    rates.set_xticks(shown, [exact_size(nbytes) for nbytes in shown], fontsize="small")
    rates.set_xticks([], minor=True)
    for panel in (times, rates):
        panel.grid(True, alpha=0.3)
