"""Find the name that somebody who misspelt it probably meant."""

from __future__ import annotations

from collections.abc import Iterable

_LIKE = 0.75  # ratio of equal letters, see difflib.SequenceMatcher; fusion_bites is 0.92 like fusion_bytes


def nearest(name: str, known: Iterable[str], like: float = _LIKE) -> str:
    """Return the one of ``known`` that ``name`` resembles most; "" if none resembles it at least as much as ``like``."""
    from difflib import get_close_matches  # only imported when a name is wrong

    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=like)), "")
