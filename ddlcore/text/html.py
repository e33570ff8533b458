"""Write HTML pages that need no other file, whatever they show."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

escaped = html.escape
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 70em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
svg, img { max-width: 100%; height: auto; }
"""


def element(name: str, text: str) -> str:
    """Return the HTML element ``name``, which contains only ``text``. The text is escaped."""
    return f"<{name}>{html.escape(text)}</{name}>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table, with ``head`` above its rows. All texts are escaped."""
    names = "".join(element("th", text) for text in head)
    body = "".join("<tr>" + "".join(element("td", text) for text in row) + "</tr>" for row in rows)
    return f"<table><tr>{names}</tr>{body}</table>"


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole HTML page. ``title`` is escaped; ``parts`` are pieces of HTML, one below the other."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{element("title", title)}'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
