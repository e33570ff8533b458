"""Format rows of text in aligned columns, for a terminal or a message."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest


def padded(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), least: Sequence[int] = ()
) -> list[tuple[str, ...]]:
    """Return ``rows``, with spaces added to each cell so that all cells of a column have the same width.

    All rows must have the same number of cells. ``right`` has the indexes of the columns that are aligned to the right.
    ``least[i]`` is the smallest allowed width of column i. Columns beyond the end of ``least`` may have any width.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows)]
    widths = [max(width, bound) for width, bound in zip_longest(widths, least[: len(widths)], fillvalue=0)]
    return [
        tuple(
            cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), least: Sequence[int] = ()) -> list[str]:
    """Return one line of text for each row, with two spaces between the columns.

    All rows must have the same number of cells. ``right`` has the indexes of the columns that are aligned to the right.
    ``least[i]`` is the smallest allowed width of column i. Columns beyond the end of ``least`` may have any width.
    """
    return ["  ".join(cells).rstrip() for cells in padded(rows, right, least)]


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table with aligned columns. Columns in which all cells are empty are left out.

    Each row maps the name of a column to the text of a cell. The first line has the names of the columns.
    """
    if not rows:
        return []
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return aligned([names, *([row[name] for name in names] for row in rows)])


def indented(lines: Iterable[str], by: str = "  ") -> list[str]:
    """Return ``lines`` with the text ``by`` in front of each line."""
    return [f"{by}{line}" for line in lines]
