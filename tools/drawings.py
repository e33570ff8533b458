"""Draws the pictures of docs/concepts.md: 16 ranks on 4 hosts, and what each collective does with their tensors."""

from __future__ import annotations

import argparse
import colorsys
from collections.abc import Callable
from pathlib import Path

HOSTS, DEVICES = 4, 4
RANKS = HOSTS * DEVICES
CELL, GAP = 44, 4  # of a rank's cell, in pixels
PAD, BETWEEN = 12, 16  # around a host's ranks, between hosts
LEFT = 108  # for the name of a row
HOST = DEVICES * CELL + (DEVICES - 1) * GAP + 2 * PAD
WIDTH = LEFT + HOSTS * HOST + (HOSTS - 1) * BETWEEN + 12
INK, PALE, LINE = "#1f2933", "#f4f6f8", "#9aa5b1"
FONT = 'font-family="Helvetica, Arial, sans-serif"'

__all__ = ["DRAWINGS", "main"]


def colour(rank: int) -> str:
    """Return a colour for each rank; the ranks of one host have similar hues."""
    host, device = divmod(rank, DEVICES)
    red, green, blue = colorsys.hls_to_rgb(0.57 + 0.21 * host, 0.83 - 0.07 * device, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def left(rank: int) -> int:
    """Return the left edge of the rank's cell."""
    host, device = divmod(rank, DEVICES)
    return LEFT + host * (HOST + BETWEEN) + PAD + device * (CELL + GAP)


def text(x: float, y: float, what: str, size: int = 14, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{INK}" {FONT}>{what}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, line: str = LINE, radius: int = 5) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" stroke="{line}"/>'
    )


def hosts(top: int, height: int) -> list[str]:
    """Return the frames of the hosts, with their names above."""
    made = []
    for host in range(HOSTS):
        x = LEFT + host * (HOST + BETWEEN)
        made += [box(x, top, HOST, height, PALE, radius=9), text(x + HOST / 2, top - 8, f"host {host}", 13)]
    return made


def row(top: int, name: str, label: Callable[[int], str], fill: Callable[[int], str] = colour) -> list[str]:
    """Return a row with a cell for each rank."""
    made = [text(LEFT - 12, top + CELL / 2 + 5, name, 13, "end")]
    for rank in range(RANKS):
        made += [
            box(left(rank), top, CELL, CELL, fill(rank)),
            text(left(rank) + CELL / 2, top + CELL / 2 + 6, label(rank), 16, weight="bold"),
        ]
    return made


def strips(top: int, name: str) -> list[str]:
    """Return a row in which each rank's cell contains the colours of all ranks, in order."""
    made = [text(LEFT - 12, top + CELL / 2 + 5, name, 13, "end")]
    part = CELL / 4
    for rank in range(RANKS):
        for other in range(RANKS):
            x, y = left(rank) + other % 4 * part, top + other // 4 * part
            made.append(f'<rect x="{x:g}" y="{y:g}" width="{part:g}" height="{part:g}" fill="{colour(other)}"/>')
            made.append(text(x + part / 2, y + part / 2 + 3, str(other), 7))
        made.append(box(left(rank), top, CELL, CELL, "none"))
    return made


def bracket(top: int, first: int, last: int, what: str) -> list[str]:
    """Return a bracket with the text ``what`` below the ranks from ``first`` to ``last``."""
    begin, end = left(first), left(last) + CELL
    path = f"M{begin} {top} v8 H{end} v-8"
    return [f'<path d="{path}" fill="none" stroke="{INK}"/>', text((begin + end) / 2, top + 26, what, 14)]


def arrows(top: int, height: int, what: str) -> list[str]:
    """Return arrows from the row before to the row after, one in each host."""
    made = []
    for host in range(HOSTS):
        x = LEFT + host * (HOST + BETWEEN) + HOST / 2
        made.append(f'<path d="M{x} {top + 4} V{top + height - 8}" stroke="{INK}" stroke-width="1.5"/>')
        tip = top + height - 3
        made.append(f'<path d="M{x - 5} {tip - 7} L{x} {tip} L{x + 5} {tip - 7} Z" fill="{INK}"/>')
    made.append(text(LEFT - 12, top + height / 2 + 5, what, 13, "end", "bold"))
    return made


def drawing(height: int, parts: list[str]) -> str:
    """Return a whole picture, with a white background so that it is readable on any page."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *parts, "</svg>\n"])


TOP, FRAME = 44, CELL + 2 * PAD  # of the first row, and of a host with one row
AFTER = TOP + CELL + 46  # of the second
TALL = AFTER + CELL + PAD - (TOP - PAD)


def _ranks(name: str, label: Callable[[int], str], below: list[str]) -> str:
    frames = hosts(TOP - PAD, FRAME)
    return drawing(TOP + CELL + PAD + (50 if below else 14), [*frames, *row(TOP, name, label), *below])


def _size() -> str:
    return _ranks("process", lambda rank: "", bracket(TOP + CELL + PAD + 8, 0, RANKS - 1, f"size() = {RANKS}"))


def _rank() -> str:
    return _ranks("rank()", str, [])


def _local_rank() -> str:
    below = [
        part
        for host in range(HOSTS)
        for part in bracket(
            TOP + CELL + PAD + 8, host * DEVICES, host * DEVICES + DEVICES - 1, f"local_size() = {DEVICES}"
        )
    ]
    return _ranks("local_rank()", lambda rank: str(rank % DEVICES), below)


def _collective(name: str, before: list[str], after: list[str]) -> str:
    frames = hosts(TOP - PAD, TALL)
    return drawing(AFTER + CELL + PAD + 14, [*frames, *before, *arrows(TOP + CELL, AFTER - TOP - CELL, name), *after])


def _allreduce() -> str:
    total = str(sum(range(RANKS)))
    return _collective("sum", row(TOP, "before", str), row(AFTER, "after", lambda rank: total, lambda rank: "#ffe8a3"))


def _allgather() -> str:
    return _collective("gather", row(TOP, "before", str), strips(AFTER, "after"))


def _broadcast() -> str:
    root = colour(0)
    return _collective("from rank 0", row(TOP, "before", str), row(AFTER, "after", lambda rank: "0", lambda rank: root))


DRAWINGS = {
    "size": _size,
    "rank": _rank,
    "local-rank": _local_rank,
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
}


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="docs/images", type=Path)
    folder: Path = parser.parse_args().folder
    for name, draw in DRAWINGS.items():
        (folder / f"concept-{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
