"""Write HTML pages that need no other file.

The pages can be read on a phone, and they are dark if the reader's system uses dark mode.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

escaped = html.escape
# The space between a number and its unit, which must stay on one line: "30.5 µs", "4.0 KiB", "2 GB/s", "+1.5 %".
_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:[nµm]?s|(?:[KMGT]i?)?B(?:/s)?|[KMG]bit/s|%)(?!\w))")
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #59636e; --paper: #ffffff; --line: #d1d9e0; --track: #f1f4f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --faint: #9aa6b2; --paper: #14181d; --line: #3a424b; --track: #20262d; }
}
* { box-sizing: border-box; }
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 64em; margin: 0 auto; padding: 1.5em 1em 3em; overflow-wrap: anywhere;
}
h1 { font-size: 1.5em; line-height: 1.2; } h2 { font-size: 1.15em; margin: 2em 0 .6em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .3em .65em; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 5em; }
img { max-width: 100%; height: auto; } small, figcaption { color: var(--faint); }
"""


def element(name: str, text: str) -> str:
    """Return an HTML element with the tag ``name`` that contains only ``text``. The text is escaped."""
    return f"<{name}>{html.escape(text)}</{name}>"


def unbroken(text: str) -> str:
    """Return ``text`` with a no-break space between each number and its unit, so that no line break separates them."""
    return _NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table with the cells of ``head`` in the first row, and ``rows`` below. All texts are escaped.

    If the table is wider than the window, the reader can scroll the table without scrolling the rest of the page.
    """
    names = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in head)
    body = "".join("<tr>" + "".join(element("td", text) for text in row) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><tr>{names}</tr>{body}</table></div>'


def page(title: str, parts: Iterable[str], style: str = "") -> str:
    """Return a complete HTML page with the title ``title``, which is escaped.

    ``parts`` are pieces of HTML, which are shown one below the other. ``style`` is additional CSS for these parts.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{element("title", title)}'
        f"<style>{_STYLE}{style}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
