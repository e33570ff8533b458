"""Draw the results of ``ddl bench`` as a chart into a file, with matplotlib. No other module of this package draws."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

from ddl_doctor.bench.results import TRANSPORT, WHOLE, MeasuredRow
from ddl_doctor.sizes import exact_size
from ddl_doctor.ticks import log_ticks, spread

_COLUMNS = 3  # operations side by side; with more, the chart is wider than a screen
_GAPS = 6  # between the labels on the axis of sizes, at most
# The colours of Okabe and Ito (2008), for readers with any kind of colour blindness. The markers tell the contenders
# apart without colours.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def require_matplotlib(path: Path) -> None:
    """Raise ValueError, with a message of one line, if no chart can be drawn to ``path``.

    The reason is that matplotlib is missing, or that matplotlib cannot write files with the suffix of ``path``.
    """
    try:
        backend = import_module("matplotlib.backends.backend_agg")
    except ImportError:
        raise ValueError("--plot needs matplotlib; pip install matplotlib") from None
    known = backend.FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise ValueError(f"--plot {path}: the name must end in one of .{', .'.join(sorted(known))}")


def draw(path: Path, rows: Sequence[MeasuredRow], transport: str, title: str) -> None:
    """Draw the results in ``rows`` into the file ``path``. The horizontal axes show the size of the tensor.

    Each operation has two panels, one above the other: the upper one shows the times, the lower one the rates in bytes
    per second. Lines show the medians over the rounds, and bands show the quartiles. ``transport`` is the name of the
    open transport, and ``title`` is the title of the chart. Raises OSError if the file cannot be written.
    """
    figure_class = import_module("matplotlib.figure").Figure
    operations = list(dict.fromkeys(row.operation for row in rows))
    columns = min(_COLUMNS, len(operations))
    lines = -(-len(operations) // columns)
    figure = figure_class(figsize=(1.5 + 3.9 * columns, 1.0 + 6.4 * lines), layout="constrained")
    panels = figure.subplots(2 * lines, columns, squeeze=False)
    names = list(dict.fromkeys(name for row in rows for name in row.times))
    legend: dict[str, Any] = {}
    for place in range(lines * columns):
        line, column = divmod(place, columns)
        times, rates = panels[2 * line][column], panels[2 * line + 1][column]
        if place >= len(operations):
            times.set_axis_off()
            rates.set_axis_off()
            continue
        if place:  # one scale for all operations, so that they can be compared
            times.sharey(panels[0][0])
            rates.sharey(panels[1][0])
        here = [row for row in rows if row.operation == operations[place]]
        for name, colour, marker in zip(names, cycle(_COLOURS), cycle(_MARKERS)):
            own = [row for row in here if name in row.times]
            if own:
                label = _label(name, transport)
                legend[label] = _plot(times, rates, own, name, {"color": colour, "marker": marker, "label": label})
        _label_axes(times, rates, operations[place], [row.nbytes for row in here])
    _label_values(panels[0][0], panels[1][0])
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title, parse_math=False)
    figure.savefig(path, dpi=110)


def _plot(times: Any, rates: Any, rows: Sequence[MeasuredRow], name: str, style: Mapping[str, Any]) -> Any:
    """Draw the times and rates of the contender ``name`` into the panels ``times`` and ``rates``.

    ``style`` holds matplotlib's arguments for the lines. Return the line of the times, for the legend.
    """
    sizes = [row.nbytes for row in rows]
    bands = [
        statistics.quantiles(row.times[name], n=4, method="inclusive") if len(row.times[name]) > 1 else None
        for row in rows
    ]
    quartiles = [band or [row.median_s(name)] * 3 for band, row in zip(bands, rows)]
    low, middle, high = ([band[part] for band in quartiles] for part in range(3))
    colour = style["color"]
    (drawn,) = times.plot(sizes, [value * 1e6 for value in middle], linestyle="-", markersize=4, **style)
    times.fill_between(sizes, [value * 1e6 for value in low], [v * 1e6 for v in high], color=colour, alpha=0.2, lw=0)
    rates.plot(sizes, [n / s / 1e9 for n, s in zip(sizes, middle)], linestyle="-", markersize=4, **style)
    rates.fill_between(
        sizes,
        [n / s / 1e9 for n, s in zip(sizes, high)],
        [n / s / 1e9 for n, s in zip(sizes, low)],
        color=colour,
        alpha=0.2,
        lw=0,
    )
    return drawn


def _label(name: str, transport: str) -> str:
    return {TRANSPORT: f"{transport}, alone", WHOLE: "ddl, whole call"}.get(name, name)


def _label_axes(times: Any, rates: Any, operation: str, sizes: Sequence[int]) -> None:
    times.set_title(operation)
    times.set(xscale="log", yscale="log", ylabel="time of a call (µs)")
    rates.set(xscale="log", xlabel="size of the whole tensor (bytes)", ylabel="bytes of the tensor per second (GB/s)")
    shown = spread(sizes, _GAPS)
    for panel in (times, rates):
        panel.set_xticks(shown, [exact_size(nbytes) for nbytes in shown], fontsize="small")
        panel.set_xticks([], minor=True)
        panel.grid(True, alpha=0.3)


def _label_values(times: Any, rates: Any) -> None:
    """Label the vertical axes of a panel of times and a panel of rates. All operations share these two axes.

    Call this function after all lines are drawn, because the ranges of the axes are not known before.
    """
    rates.set_ylim(bottom=0)
    times.set_yticks(log_ticks(*times.get_ylim()))
    times.set_yticks([], minor=True)
    times.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
