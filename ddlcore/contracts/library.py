"""Describes a library that a plugin uses: which version is loaded, and what that version can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Library"]


@dataclass(frozen=True)
class Library:
    """A library that this process has loaded."""

    name: str
    version: int  # its own version code, above 0
    facts: Mapping[str, str] = field(default_factory=dict)  # for people to read: its path, its features
