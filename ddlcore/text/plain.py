"""Make any text safe for a terminal, a page or a file.

This is needed because names and paths are given by the user and may contain any character.
"""

from __future__ import annotations


def plain(text: str) -> str:
    """Return ``text`` with a backslash escape in place of each character that cannot be printed."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == " " else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
