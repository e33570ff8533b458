"""Lay out rows of text in aligned columns, for a terminal or a message."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest


def padded(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), least: Sequence[int] = ()
) -> list[tuple[str, ...]]:
    """Return the rows with each cell padded to the width of its column.

    All rows have the same number of cells. ``right`` holds the indexes of the columns that are aligned to the right,
    ``least`` the smallest widths of the first columns.
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
    """Return a line for each row, with two spaces between the columns. The arguments are those of ``padded``."""
    return ["  ".join(cells).rstrip() for cells in padded(rows, right, least)]


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table. The keys of ``rows`` are its heading; columns that are always empty are omitted."""
    if not rows:
        return []
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return aligned([names, *([row[name] for name in names] for row in rows)])


def indented(lines: Iterable[str], by: str = "  ") -> list[str]:
    """Return the lines with ``by`` before each."""
    return [f"{by}{line}" for line in lines]
