"""Write lists of ranks as text."""

from __future__ import annotations

from collections.abc import Sequence


def span(ranks: Sequence[int], between: str = ",") -> str:
    """Return ``ranks`` as text, with consecutive ranks as a range: "0-2,5" for 0, 1, 2 and 5.

    ``ranks`` must be sorted. The text ``between`` is put between two ranges.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return between.join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``ranks``, which must be sorted, in words, such as "rank 3" or "ranks 0-2, 5"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {span(ranks, ', ')}"
