"""Pages lead to one another, and the README shows an example first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_comes_first() -> None:
    """By line 15 a reader has seen a whole example with its output."""
    assert README.splitlines().index("# [1] rank 1 of 2 learned y = 3.0 x") < 15


PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
)


def anchors(page: Path) -> set[str]:
    """What headings are called in links to them."""
    bare = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", head)
        for head in re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    ]
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in bare}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file, and a heading in it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lost = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)[^)]*\)", text):
        target = page.parent / link if link else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            lost.append(f"{link}#{anchor}")
    assert lost == []


def test_every_page_is_in_the_index() -> None:
    """Nobody finds what docs/index.md does not lead to."""
    text = (ROOT / "docs/index.md").read_text()
    led_to = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#]+)", text)}
    pages = {page for page in (ROOT / "docs").glob("**/*.md") if page.name != "index.md"}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - led_to) == []


def test_paths_in_the_architecture_exist() -> None:
    """Every file or folder of ddlcore that docs/design/architecture.md names is there."""
    text = (ROOT / "docs/design/architecture.md").read_text()
    names = {name for name in re.findall(r"`([a-z_/]+(?:\.py|/))`", text) if name not in ("observe/", "tune/")}
    known = [ROOT, ROOT / "ddlcore", ROOT / "ddlcore/contracts"]
    assert names
    assert [name for name in sorted(names) if not any((folder / name).exists() for folder in known)] == []
