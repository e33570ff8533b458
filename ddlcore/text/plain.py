"""Make any text safe for a terminal, a page or a file: names and paths come from the user and may hold anything."""

from __future__ import annotations


def plain(text: str) -> str:
    """Return ``text`` with characters that cannot be printed, such as control characters, as backslash escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == " " else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
