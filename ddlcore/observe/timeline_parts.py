"""Name the files that hold the ranks' parts of a timeline. Agents send these files to the launcher."""

from __future__ import annotations

import re
from pathlib import Path

_NUMBERS = re.compile(r"rank(\d+)(?:\.(\d+))?\.json")


def part_of(directory: Path, rank: int) -> Path:
    """Return the path of a new file for the timeline of ``rank`` in ``directory``.

    If the rank already has a file in the directory, the new name contains a number.
    """
    number = 0
    while True:
        path = directory / (f"rank{rank}.{number}.json" if number else f"rank{rank}.json")
        if not path.exists():
            return path
        number += 1


def parts_in(directory: Path) -> list[Path]:
    """Return the paths of the ranks' parts in ``directory``, in the order of the ranks."""
    found = [(match, path) for path in directory.glob("rank*.json") if (match := _NUMBERS.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda one: (int(one[0][1]), int(one[0][2] or 0)))]
