"""Finds what pages link to outside docs/, and says which page of the site shows it. Reads files, and knows no MkDocs."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__all__ = ["DOCS", "PLACE", "ROOT", "outside_pages", "pages_of", "rewritten", "site_uri", "without_comments"]

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
PLACE = "source"  # the folder of the site for files from outside docs/
MOST_FILES = 25  # a folder with more files is shown as a list of names
FENCED = re.compile(r"^(```+|~~~+)[^\n]*\n.*?^\1$\n?", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"^<!--.*?-->[ ]*\n?", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")  # relative: it contains no scheme
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
HIDDEN = ("__pycache__", ".ruff_cache", ".mypy_cache", ".pytest_cache")


def pages_of(root: Path) -> list[str]:
    """Return the pages of docs/, as paths from ``root``."""
    return sorted(page.relative_to(root).as_posix() for page in (root / DOCS).rglob("*.md"))


def site_uri(path: str, root: Path = ROOT) -> str:
    """Return the page of the site that shows the file or folder ``path``, which is a path from ``root``.

    A file of docs/ has its own place. A folder outside docs/ is shown by its README.md, if it has one.
    """
    if path == DOCS or path.startswith(f"{DOCS}/"):
        return posixpath.relpath(path, DOCS)
    if (root / path).is_dir():
        return f"{PLACE}/{path}/{'README' if (root / path / 'README.md').is_file() else 'index'}.md"
    return f"{PLACE}/{path}" + ("" if path.endswith(".md") else ".md")


def rewritten(markdown: str, path: str, root: Path = ROOT) -> str:
    """Return the page ``path`` of the repository with links that lead to pages of the site.

    Raises ValueError for a link to a file that does not exist.
    """

    def link(found: re.Match[str]) -> str:
        target = _target(path, found["path"], root)
        where = posixpath.relpath(site_uri(target, root), posixpath.dirname(site_uri(path, root)) or ".")
        return f"]({where}{found['anchor'] or ''})"

    return _outside_of_fences(markdown, lambda text: LINK.sub(link, text))


def without_comments(markdown: str) -> str:
    """Return a page without its HTML comments: they say to the tests how a block is run, and nothing to a reader."""
    return _outside_of_fences(markdown, lambda text: COMMENT.sub("", text))


def outside_pages(root: Path = ROOT) -> Mapping[str, str]:
    """Return the text of all pages of the site that show what pages link to outside docs/, by their place in the site.

    A Markdown page from outside docs/ may link to further files, which then have pages, too.
    """
    found: dict[str, str] = {}
    queue = [target for path in pages_of(root) for target in _targets(root, path)]
    while queue:
        target = queue.pop()
        if target.startswith(f"{DOCS}/") or target == DOCS or site_uri(target, root) in found:
            continue
        if (root / target).is_dir() and not (root / target / "README.md").is_file():
            shown, further = _folder(root, target)
        else:
            target = f"{target}/README.md" if (root / target).is_dir() else target
            shown, further = _file(root, target)
        found[site_uri(target, root)] = shown
        queue += further
    return found


def _outside_of_fences(markdown: str, change: Callable[[str], str]) -> str:
    parts: list[str] = []
    end = 0
    for fence in FENCED.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _target(path: str, link: str, root: Path) -> str:
    """Return to what a link of the page ``path`` leads, as a path from ``root``."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if target.startswith("..") or not (root / target).exists():
        raise ValueError(f"{path}: there is no {link}")
    return target


def _targets(root: Path, path: str) -> Iterator[str]:
    text = FENCED.sub("", (root / path).read_text(encoding="utf-8"))
    for found in LINK.finditer(text):
        yield _target(path, found["path"], root)


def _file(root: Path, path: str) -> tuple[str, list[str]]:
    """Return the page for a file, and what that page links to."""
    text = (root / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        files, links = _files_below(root, posixpath.dirname(path)) if path.endswith("README.md") else ([], False)
        shown = [one for one in files if one != path] if links else []
        place = site_uri(path, root)
        rows = "\n".join(_row(one, place, root) for one in shown)
        text = without_comments(rewritten(text, path, root))
        further = [*_targets(root, path), *shown]
        return _unsearched(text + (f"\n## Files\n\n{rows}\n" if rows else "")), further
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return _unsearched(f"# `{path}`\n\n~~~~~~ {language}\n{text.rstrip()}\n~~~~~~\n"), []


def _folder(root: Path, path: str) -> tuple[str, list[str]]:
    """Return the page for a folder, and the files that it links to."""
    files, links = _files_below(root, path)
    place = site_uri(path, root)
    rows = [_row(one, place, root) if links else f"- `{one}`" for one in files]
    return _unsearched(f"# `{path}/`\n\n" + "\n".join(rows) + "\n"), files if links else []


def _files_below(root: Path, path: str) -> tuple[list[str], bool]:
    """Return the files below the folder ``path``, and whether they are few enough, and texts, to have pages."""
    below = sorted(one for one in (root / path).rglob("*") if one.is_file() and not set(HIDDEN) & set(one.parts))
    files = [one for one in below if one.stat().st_size]
    return [one.relative_to(root).as_posix() for one in files], len(files) <= MOST_FILES and all(map(_is_text, files))


def _row(file: str, place: str, root: Path) -> str:
    return f"- [`{file}`]({posixpath.relpath(site_uri(file, root), posixpath.dirname(place))})"


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _unsearched(markdown: str) -> str:
    """Return a page that the search of the site leaves out: it is for those who follow a link to it."""
    return f"---\nsearch:\n  exclude: true\n---\n\n{markdown}"
