"""Find the known name that the user probably meant by a misspelt name."""

from __future__ import annotations

from collections.abc import Iterable

_LIKE = 0.75  # ratio of equal letters, see difflib.SequenceMatcher; it is 0.92 for fusion_bites and fusion_bytes


def nearest(name: str, known: Iterable[str], like: float = _LIKE) -> str:
    """Return the name in ``known`` that is most similar to ``name``, or "" if no name is similar enough.

    ``like`` is the smallest similarity that is enough, from 0 (no letter is equal) to 1 (the names are equal).
    """
    from difflib import get_close_matches  # only imported when a name is wrong

    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=like)), "")
