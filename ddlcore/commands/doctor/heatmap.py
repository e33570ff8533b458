"""Draw matrices as heat maps with matplotlib. No other module of this package imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ddlcore.commands.doctor.report import figure
from ddlcore.contracts.check import Matrix

_MOST_NAMED = 20  # rows; with more, the cells are too small for numbers


def draw(path: Path, matrices: Sequence[Matrix], title: str) -> None:
    """Draw one panel for each matrix, two side by side, into the file ``path``.

    Dark cells are good: small latencies and large bandwidths.
    """
    figure_class = import_module("matplotlib.figure").Figure
    rows = -(-len(matrices) // 2)
    columns = min(2, len(matrices))
    sheet = figure_class(figsize=(6.4 * columns, 5.4 * rows + 0.5), layout="constrained")
    panels = sheet.subplots(rows, columns, squeeze=False)
    flat = [panel for row in panels for panel in row]
    for panel, matrix in zip(flat, matrices):
        _plot(sheet, panel, matrix)
    for panel in flat[len(matrices) :]:
        panel.set_axis_off()
    sheet.suptitle(title)
    sheet.savefig(path, dpi=110)


def _plot(sheet: Any, panel: Any, matrix: Matrix) -> None:
    size = len(matrix.names)
    # The diagonal shows a GPU's own memory, which is much faster than any link. Its number is shown without a colour:
    # on a scale that includes it, all links would have nearly the same colour.
    pairs = [[None if x == y else value for x, value in enumerate(row)] for y, row in enumerate(matrix.values)]
    values = [[float("nan") if value is None else value for value in row] for row in pairs]
    known = [value for row in pairs for value in row if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    yes_no = matrix.unit == "Y/N"
    small_is_good = matrix.unit == "us"
    colours = (
        import_module("matplotlib").colormaps["viridis_r" if not small_is_good else "viridis"].with_extremes(bad="0.93")
    )
    norm: Any
    if yes_no:
        norm = import_module("matplotlib.colors").Normalize(0, 1)
    elif low > 0 and high / low > 20:  # links within and between hosts differ by orders of magnitude
        norm = import_module("matplotlib.colors").LogNorm(low, high)
    else:
        norm = import_module("matplotlib.colors").Normalize(0, high or 1)
    image = panel.imshow(values, cmap=colours, norm=norm)
    panel.set_title(matrix.title)
    panel.set(xlabel="to", ylabel="from")
    step = max(1, size // _MOST_NAMED)
    panel.set_xticks(range(0, size, step), matrix.names[::step])
    panel.set_yticks(range(0, size, step), matrix.names[::step])
    if size <= _MOST_NAMED:
        _write(panel, matrix, norm, colours)
    if not yes_no:
        plain = import_module("matplotlib.ticker").FuncFormatter(lambda value, _: f"{value:g}")
        unit = "µs" if matrix.unit == "us" else matrix.unit
        bar = sheet.colorbar(image, ax=panel, label=unit, shrink=0.85, format=plain)
        bar.ax.minorticks_off()


def _write(panel: Any, matrix: Matrix, norm: Any, colours: Any) -> None:
    font = max(5, min(10, 90 // len(matrix.names)))
    for y, row in enumerate(matrix.values):
        for x, value in enumerate(row):
            if value is None:
                continue
            red, green, blue, _ = colours(norm(value))
            dark = x != y and 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
            colour = "white" if dark else "black"
            text = ("Y" if value else "N") if matrix.unit == "Y/N" else figure(value)
            panel.text(x, y, text, ha="center", va="center", color=colour, fontsize=font)
