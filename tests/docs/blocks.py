"""Finds the fenced blocks of all pages, and what comments before them say about how they are run.

A block is run unless a comment right before its fence says otherwise. Comments are what nobody sees on the page:

    <!-- before: CODE -->                  of the block's own language, run before it
    <!-- after: CODE -->                   likewise, behind it
    <!-- not run: REASON -->               only parsed, and why
    <!-- not run where it says "WORD": REASON -->     so are those lines of it that hold WORD
    <!-- run by: FILE -->                  another test runs it, which names the page
    <!-- on hosts -->                      node1, node2, … are hosts of a test cluster; where there is none, it is parsed
    <!-- on Slurm -->                      a batch file, for a Slurm of two nodes; where there is none, it is parsed
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "blocks"]

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "plugins/*/README.md", "examples/**/*.md")
PAGES = [str(page.relative_to(ROOT)) for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))]
FENCED = re.compile(
    r"(?P<marks>(?:^<!--(?:(?!-->).)*-->\n+)*)^```(?P<language>\S*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
KINDS = ("before", "after", "not run", "run by", "on hosts", "on Slurm")
MARK = re.compile(
    rf"(?P<kind>{'|'.join(KINDS)})(?: where it says \"(?P<word>[^\"]+)\")?(?::\s(?P<said>.*))?", re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One of a page, whose text is ``code`` in ``language``."""

    page: str
    line: int  # of the page, from 1
    language: str
    code: str
    before: str = ""
    after: str = ""
    not_run: str = ""  # the reason
    not_run_lines: tuple[tuple[str, str], ...] = ()  # (word, reason)
    run_by: str = ""
    place: str = ""  # "on hosts", "on Slurm"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def why_not(self, command: str) -> str:
        """The reason not to run that line of it; "" where it is run."""
        reasons = [reason for word, reason in self.not_run_lines if word in command]
        return self.not_run or " ".join(reasons)


def blocks(page: str, text: str = "") -> list[Block]:
    """Those of a page, in order. ``ValueError`` for a comment that says nothing of the above."""
    text = text or (ROOT / page).read_text()
    return [_block(page, text, found) for found in FENCED.finditer(text)]


def _block(page: str, text: str, found: re.Match[str]) -> Block:
    line = text.count("\n", 0, found.start("language")) + 1
    said: dict[str, str] = {}
    lines = []
    for comment in COMMENT.findall(found["marks"]):
        if not comment.startswith(KINDS):  # it is not about the block
            continue
        mark = MARK.fullmatch(comment)
        kind, reason = (mark["kind"], (mark["said"] or "").strip()) if mark else ("", "")
        if mark is None or (mark["word"] and kind != "not run") or kind.startswith("on ") == bool(reason):
            raise ValueError(f"{page}:{line}: {comment!r} says nothing about the block below it")
        if mark["word"]:
            lines.append((mark["word"], reason))
        else:
            said[kind] = reason
    return Block(
        page,
        line,
        found["language"],
        found["code"],
        before=said.get("before", ""),
        after=said.get("after", ""),
        not_run=said.get("not run", ""),
        not_run_lines=tuple(lines),
        run_by=said.get("run by", ""),
        place=next((kind for kind in said if kind.startswith("on ")), ""),
    )
