"""Formats a stall as a table: for each tensor, where it is ready, on which ranks it is missing, and how long it waits.

The functions of this module have no side effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddlcore.text.columns import aligned, indented
from ddlcore.text.ranks import span

SHOWN = 8  # how many tensors that wait for the same ranks are shown; the others are only counted
_MOST_SPANS = 12  # how many spans of a list of ranks are shown: nobody reads hundreds of them
_HEADINGS = ("tensor", "ready on", "missing ranks", "waits s")


@dataclass(frozen=True)
class Late:
    """A tensor that is ready on the ranks in ``ready``, but not on those in ``missing``."""

    name: str
    set_id: int
    ready: tuple[int, ...]
    missing: tuple[int, ...]
    waits_s: float


def spans(ranks: Iterable[int]) -> str:
    """Return the ranks as a text of spans: 0, 1, 2, 5 become "0-2,5".

    If the list has many spans, the text contains only the first of them, and then the number of all ranks.
    """
    known = sorted(ranks)
    pieces = span(known).split(",")
    if len(pieces) <= _MOST_SPANS:
        return ",".join(pieces) or "none"
    return f"{','.join(pieces[:_MOST_SPANS])},… ({len(known)} ranks)"


def on_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as a text such as "rank 3" or "ranks 0-2,5"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def stall_table(late: Sequence[Late]) -> str:
    """Return a table of the tensors ``late``, as aligned lines without a newline at the end.

    Tensors that wait for the same ranks are listed together. Of many such tensors, only the first are listed by name.
    """
    groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[Late]] = {}
    for one in late:
        groups.setdefault((one.set_id, one.ready, one.missing), []).append(one)
    rows = [_HEADINGS]
    for (set_id, ready, missing), alike in groups.items():
        where = f" (process set {set_id})" if set_id else ""
        shown = alike if len(alike) <= SHOWN + 1 else alike[:SHOWN]  # a line "… 1 more" would save no line
        told = [(f"{one.name or '(a call without a name)'}{where}", one.waits_s) for one in shown]
        if rest := alike[len(shown) :]:
            told.append((f"… {len(rest)} more{where}", max(one.waits_s for one in rest)))
        rows += [(name, spans(ready), spans(missing), f"{waits_s:.1f}") for name, waits_s in told]
    return "\n".join(indented(aligned(rows, right=[3])))
