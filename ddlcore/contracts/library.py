"""Describes a library that a plugin uses: the loaded version, and the features of that version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Library"]


@dataclass(frozen=True)
class Library:
    """The description of a library that this process has loaded.

    ``facts`` are further facts about the library, such as its path and its features. They are shown to users.
    """

    name: str
    version: int  # the library's own version code, above 0
    facts: Mapping[str, str] = field(default_factory=dict)  # shown to users, such as the path and the features
