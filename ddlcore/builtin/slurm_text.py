"""How Slurm writes lists of nodes and of counts: brackets and repeats, unfolded."""

from __future__ import annotations

import re
from itertools import product

__all__ = ["node_names", "tasks_per_node"]

_MOST = 1 << 17  # names; a list that unfolds to more is a mistake
_PART = re.compile(r"\[([^][]*)\]|([^][,]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def node_names(text: str) -> list[str]:
    """``rack[1-2]n[01-03,7],login`` as single names, in order, as ``scontrol show hostnames`` would give them.

    Raises ValueError for what is no such list.
    """
    names: list[str] = []
    for item in _items(text):
        parts: list[list[str]] = []
        at = 0
        for found in _PART.finditer(item):
            if found.start() != at:
                break
            at = found.end()
            parts.append([found[2]] if found[1] is None else _unfold(found[1], text))
        if at != len(item) or not item:
            raise ValueError(f"'{text}' is no list of nodes such as node[01-04,7],login")
        size = 1
        for part in parts:
            size *= len(part)
        if len(names) + size > _MOST:
            raise ValueError(f"'{text}' names more than {_MOST} nodes")
        names += ["".join(chosen) for chosen in product(*parts)]
    return names


def tasks_per_node(text: str) -> list[int]:
    """``2(x3),1`` as one count a node: [2, 2, 2, 1]. Raises ValueError for what is no such list."""
    counts: list[int] = []
    for item in text.split(","):
        found = _COUNT.fullmatch(item.strip())
        if found is None or int(found[2] or 1) > _MOST:
            raise ValueError(f"'{text}' is no list of tasks per node such as 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _items(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    items, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            items.append(text[start:at].strip())
            start = at + 1
    return [*items, text[start:].strip()]


def _unfold(ranges: str, text: str) -> list[str]:
    unfolded: list[str] = []
    for one in ranges.split(","):
        found = _RANGE.fullmatch(one.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]) or int(found[2] or 0) - int(found[1]) > _MOST:
            raise ValueError(f"'{text}' is no list of nodes: [{ranges}] holds no ranges such as 01-04,7")
        width = len(found[1])  # leading zeros are part of the names
        unfolded += [f"{number:0{width}d}" for number in range(int(found[1]), int(found[2] or found[1]) + 1)]
    return unfolded
