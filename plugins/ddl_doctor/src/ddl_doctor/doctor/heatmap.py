"""Draw matrices of measured links with matplotlib: as bars for two or three members, as heat maps for more.

The members of a matrix are ranks or GPUs. No other module of this package imports matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from ddl_doctor.doctor.report import figure
from ddl_doctor.ticks import log_ticks
from ddlcore.contracts.check import Matrix

MOST_IN_BARS = 3  # members; between them are 6 links, and 6 lengths are easier to compare than 6 colours
SPAN = 5.0  # the colours of a heat map cover at least this ratio, so that differences by noise have nearly one colour
_MOST_NAMED = 20  # rows, or hosts; with more, numbers and names do not fit
_PANEL_INCHES = 6.4, 5.0
_BLUE = "#0072b2"
_AXES = {"us": "latency (µs), less is better", "GB/s": "bandwidth (GB/s), more is better"}


def draw(path: Path, matrices: Sequence[Matrix], title: str) -> None:
    """Draw one panel for each matrix, two panels side by side, into the file ``path``.

    In a heat map, a light cell shows a good value: a small latency or a large bandwidth. ``title`` is the title of the
    whole figure. Raises OSError if the file cannot be written.
    """
    width, _ = _PANEL_INCHES
    columns = min(2, len(matrices))
    rows = [matrices[i : i + columns] for i in range(0, len(matrices), columns)]
    heights = [max(map(_height_inches, row)) for row in rows]
    figure_class = import_module("matplotlib.figure").Figure
    sheet = figure_class(figsize=(width * columns, sum(heights) + 0.5), layout="constrained")
    panels = sheet.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    flat = [panel for row in panels for panel in row]
    for panel, matrix in zip(flat, matrices):
        panel.set_title(matrix.title, parse_math=False)
        if not known_values(matrix):
            panel.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=panel.transAxes)
            panel.set_axis_off()
        elif _in_bars(matrix):
            _draw_bars(panel, matrix)
        else:
            _draw_cells(sheet, panel, matrix)
    for panel in flat[len(matrices) :]:
        panel.set_axis_off()
    sheet.suptitle(title, parse_math=False)
    sheet.savefig(path, dpi=110)


def known_values(matrix: Matrix) -> list[float]:
    """Return the measured values between two different members, without those that are None.

    The diagonal is left out, because it shows a GPU's own memory, which is much faster than any link. If the colour
    scale included the diagonal, all links would have nearly the same colour.
    """
    return [value for y, row in enumerate(matrix.values) for x, value in enumerate(row) if x != y and value is not None]


def colour_range(values: Sequence[float], small_is_good: bool) -> tuple[float, float]:
    """Return the values of the first and the last colour of a heat map. All ``values`` must be positive.

    One end of the range is the best value. The other end is the best value times ``SPAN`` (divided by ``SPAN``, if
    large values are good), or the worst value if it is even worse. Without this minimum, the slowest of several nearly
    equal links would have the colour of a broken link. ``small_is_good`` is true for latencies, and false for
    bandwidths.
    """
    low, high = min(values), max(values)
    return (low, max(high, low * SPAN)) if small_is_good else (min(low, high / SPAN), high)


def _in_bars(matrix: Matrix) -> bool:
    return len(matrix.names) <= MOST_IN_BARS and matrix.unit in _AXES


def _height_inches(matrix: Matrix) -> float:
    return 1.3 + 0.5 * len(known_values(matrix)) if _in_bars(matrix) else _PANEL_INCHES[1]


def _draw_bars(panel: Any, matrix: Matrix) -> None:
    links = [
        (link_name(matrix, a, b), value)
        for a, row in enumerate(matrix.values)
        for b, value in enumerate(row)
        if a != b and value is not None
    ]
    names, values = [name for name, _ in links], [value for _, value in links]
    bars = panel.barh(range(len(links)), values, height=0.6, color=_BLUE)
    panel.bar_label(bars, [figure(value) for value in values], padding=4)
    panel.set_yticks(range(len(links)), names)
    panel.invert_yaxis()
    panel.set_xlim(0, max(values) * 1.15 or 1)
    panel.set_xlabel(_AXES[matrix.unit])
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(True, axis="x", alpha=0.3)
    panel.set_axisbelow(True)


def link_name(matrix: Matrix, a: int, b: int) -> str:
    """Return the name of the link from the member with index ``a`` to the member with index ``b``.

    The name contains the hosts of both members if the matrix has hosts.
    """
    names, hosts = matrix.names, matrix.hosts
    if not hosts:
        return f"{names[a]} → {names[b]}"
    if hosts[a] == hosts[b]:
        return f"rank {names[a]} → rank {names[b]}\non {hosts[a]}"
    return f"rank {names[a]} on {hosts[a]}\n→ rank {names[b]} on {hosts[b]}"


def _draw_cells(sheet: Any, panel: Any, matrix: Matrix) -> None:
    known = known_values(matrix)
    small_is_good, yes_no = matrix.unit == "us", matrix.unit == "Y/N"
    colours = import_module("matplotlib").colormaps["Blues" if small_is_good else "Blues_r"].with_extremes(bad="0.93")
    classes = import_module("matplotlib.colors")
    is_log = not yes_no and min(known) > 0  # a bandwidth of 0 has no place on a logarithmic scale
    norm = classes.LogNorm(*colour_range(known, small_is_good)) if is_log else classes.Normalize(0, max(known) or 1)
    cells = [
        [float("nan") if value is None or x == y else value for x, value in enumerate(row)]
        for y, row in enumerate(matrix.values)
    ]
    image = panel.imshow(cells, cmap=colours, norm=norm)
    _name_cells(panel, matrix)
    if len(matrix.names) <= _MOST_NAMED:
        _write_values(panel, matrix, norm, colours)
    if not yes_no:
        bar = sheet.colorbar(image, ax=panel, label=_AXES.get(matrix.unit, matrix.unit), shrink=0.85)
        if is_log:
            bar.set_ticks(log_ticks(norm.vmin, norm.vmax), minor=False)
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        bar.ax.minorticks_off()


def _name_cells(panel: Any, matrix: Matrix) -> None:
    """Label both axes of a heat map with the names of the members, and farther outside with the names of the hosts.

    Draw white lines between the members of different hosts.
    """
    size = len(matrix.names)
    step = max(1, -(-size // _MOST_NAMED))
    places, names = range(0, size, step), matrix.names[::step]
    panel.set_xticks(places, names)
    panel.set_yticks(places, names)
    of_rank = " rank" if matrix.hosts else ""
    panel.set(xlabel=f"to{of_rank}", ylabel=f"from{of_rank}")
    groups = [
        (host, [place for place, _ in same]) for host, same in groupby(enumerate(matrix.hosts), lambda one: one[1])
    ]
    if not 0 < len(groups) <= _MOST_NAMED:
        return
    centres = [(same[0] + same[-1]) / 2 for _, same in groups]
    hosts = [host for host, _ in groups]
    crowded = sum(len(host) + 2 for host in hosts) > 40
    for axis in (panel.xaxis, panel.yaxis):
        axis.remove_overlapping_locs = False  # the name of a host may be at the same place as the number of a rank
        axis.set_ticks(centres, hosts, minor=True)
    panel.tick_params(axis="x", which="minor", length=0, pad=18, rotation=90 if crowded else 0)
    panel.tick_params(axis="y", which="minor", length=0, pad=24)
    if len(groups) == size:
        return
    for _, same in groups[1:]:
        panel.axhline(same[0] - 0.5, color="white", linewidth=2.5)
        panel.axvline(same[0] - 0.5, color="white", linewidth=2.5)


def _write_values(panel: Any, matrix: Matrix, norm: Any, colours: Any) -> None:
    font = max(5, min(10, 90 // len(matrix.names)))
    for y, row in enumerate(matrix.values):
        for x, value in enumerate(row):
            if value is None:
                continue
            red, green, blue, _ = colours(norm(value))
            dark = x != y and 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
            text = ("Y" if value else "N") if matrix.unit == "Y/N" else figure(value)
            panel.text(x, y, text, ha="center", va="center", color="white" if dark else "black", fontsize=font)
