"""The site of ``make docs``: every page has a place in it, and links out of docs/ lead to pages that it has."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import ROOT
from tools.docs_site.outside import DOCS, outside_pages, pages_of, rewritten, site_uri, without_comments

HOOKS = ROOT / "tools/docs_site/hooks.py"


# Reads mkdocs.yml, whose tags name functions for MkDocs to call.
Loader: Any = type("Loader", (yaml.SafeLoader,), {})
Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def settings() -> Any:
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def in_navigation(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    parts = node.values() if isinstance(node, dict) else node
    return [page for part in parts for page in in_navigation(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    """Those of docs/, and those that the hook adds about public packages."""
    added = re.findall(r'^    "(api/\w+\.md)":', HOOKS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(added) == 5
    pages = [page.removeprefix(f"{DOCS}/") for page in pages_of(ROOT)]
    assert len(pages) > 30
    assert sorted(in_navigation(settings()["nav"])) == sorted([*pages, *added])


def test_the_build_is_strict() -> None:
    """Links, anchors and pages without a place are warnings, and a warning ends the build."""
    told = settings()
    assert told["strict"] is True
    assert told["validation"]["nav"]["omitted_files"] == "warn"
    assert [told["validation"]["links"][name] for name in ("not_found", "anchors")] == ["warn", "warn"]
    assert told["theme"]["font"] is False, "its fonts come from another server"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"mkdocs build --strict$", makefile, re.MULTILINE), "with --quiet, warnings are not counted"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with two pages, an example, a folder with a README and one without."""
    files = {
        "docs/index.md": "[deep](design/deep.md#why) ![p](images/p.svg)\n",
        "docs/images/p.svg": "<svg/>",
        "docs/design/deep.md": (
            "[home](../index.md) [an example](../../examples/a.py) [all](../../examples) [tool](../../tool/)\n"
            "```sh\n<!-- kept -->\n[not a link](nowhere.md)\n```\n<!-- not run: it is\nlong -->\n[out](https://example.org/x.md)\n"
        ),
        "examples/a.py": 'print("""\n```\n""")\n',
        "examples/b.sh": "true\n",
        "tool/README.md": "# Tool\n\n[home](../docs/index.md), [a](../examples/a.py)\n<!-- not run: x -->\n",
        "tool/t.py": "pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_places_in_the_site(tree: Path) -> None:
    """Pages keep theirs; what is outside docs/ is in a folder of its own."""
    places = {path: site_uri(path, tree) for path in ("docs/design/deep.md", "examples/a.py", "examples", "tool")}
    assert places == {
        "docs/design/deep.md": "design/deep.md",
        "examples/a.py": "source/examples/a.py.md",
        "examples": "source/examples/index.md",
        "tool": "source/tool/README.md",
    }


def test_links_out_of_docs_lead_to_pages_of_the_site(tree: Path) -> None:
    """Links to other pages, to other servers and in code stay as they are."""
    assert (
        rewritten((tree / "docs/index.md").read_text(), "docs/index.md", tree) == (tree / "docs/index.md").read_text()
    )
    text = rewritten((tree / "docs/design/deep.md").read_text(), "docs/design/deep.md", tree)
    assert text.splitlines()[0] == (
        "[home](../index.md) [an example](../source/examples/a.py.md) [all](../source/examples/index.md) "
        "[tool](../source/tool/README.md)"
    )
    assert "[not a link](nowhere.md)" in text and "[out](https://example.org/x.md)" in text


def test_pages_for_what_is_outside(tree: Path) -> None:
    """A file is shown as it is, a folder as a list of its files, a README with the files beside it."""
    pages = outside_pages(tree)
    assert sorted(pages) == [
        "source/examples/a.py.md",
        "source/examples/b.sh.md",
        "source/examples/index.md",
        "source/tool/README.md",
        "source/tool/t.py.md",
    ]
    assert '~~~~~~ python\nprint("""\n```\n""")\n~~~~~~' in pages["source/examples/a.py.md"]
    assert "- [`examples/b.sh`](b.sh.md)" in pages["source/examples/index.md"]
    readme = pages["source/tool/README.md"]
    assert "[home](../../index.md), [a](../examples/a.py.md)" in readme
    assert "not run" not in readme and "- [`tool/t.py`](t.py.md)" in readme


def test_comments_are_not_part_of_the_site(tree: Path) -> None:
    """Except in code, which is shown as it is."""
    text = without_comments((tree / "docs/design/deep.md").read_text())
    assert "not run" not in text and "long" not in text and "<!-- kept -->" in text


def test_a_link_to_nothing_is_named(tree: Path) -> None:
    """With its page."""
    with pytest.raises(ValueError, match=r"docs/index\.md: there is no \.\./lost\.py"):
        rewritten("[lost](../lost.py)", "docs/index.md", tree)


def test_nothing_is_loaded_from_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page with such a tag is refused; a link that a reader may follow is not."""
    pytest.importorskip("mkdocs", reason="the hook is one of MkDocs")
    monkeypatch.setattr(sys, "path", sys.path.copy())  # the hook adds to it, for MkDocs
    from mkdocs.exceptions import PluginError

    from tools.docs_site.hooks import on_post_page

    class Page:
        class file:
            src_uri = "index.md"

    fine = '<a href="https://example.org">x</a><script src="assets/a.js"></script><link rel="icon" href="a.png">'
    assert on_post_page(fine, Page, None) == fine
    for bad in (
        '<script src="https://cdn/a.js">',
        '<link rel="stylesheet" href="https://fonts/x">',
        "<img src=http://x/y>",
    ):
        with pytest.raises(PluginError, match=r"index\.md: the page loads http"):
            on_post_page(bad, Page, None)
