"""Adapts docs/ to the site of ``make docs``, as a hook of MkDocs: adds pages, and leads links to them.

The pages of docs/ are written to be read in the repository. In the site, links to files outside docs/ lead to pages
that show these files, the reference of the contracts has signatures with links, and the public functions of the
packages have pages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # MkDocs loads this file by its path

from tools.docs_site.outside import DOCS, PLACE, outside_pages, rewritten, without_comments
from tools.reference import HEAD, MODULES

__all__ = ["API", "on_files", "on_page_markdown", "on_post_page"]

# Pages about public packages: what they are called, and what a script imports.
API = {
    "api/ddlcore.md": ("ddlcore", "the core, with the functions for numpy arrays"),
    "api/ddl_torch.md": ("ddl_torch", "PyTorch"),
    "api/ddl_tf.md": ("ddl_tf", "TensorFlow"),
    "api/ddl_tf_keras.md": ("ddl_tf.keras", "Keras"),
    "api/ddl_mxnet.md": ("ddl_mxnet", "MXNet"),
}
REFERENCE = "reference.md"
# Tags that make a browser fetch something, with the address that they name.
FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=\"?(https?:[^\s\">]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for place, (package, what) in API.items():
        files.append(File.generated(config, place, content=_api_page(package, what)))
    try:
        for place, text in outside_pages().items():
            files.append(File.generated(config, place, content=text))
    except ValueError as error:
        raise PluginError(str(error)) from None
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the text of a page with links for the site and without comments."""
    place: str = page.file.src_uri
    if place in API or place.startswith(f"{PLACE}/"):  # written for the site
        return markdown
    return without_comments(rewritten(_reference() if place == REFERENCE else markdown, f"{DOCS}/{place}"))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that would load anything from another server."""
    found = FETCHED.search(output)
    if found is not None:
        raise PluginError(f"{page.file.src_uri}: the page loads {found[1]}; ship it with the site")
    return output


def _api_page(package: str, what: str) -> str:
    return f"# {package}\n\n`import {package} as ddl`: {what}.\n\n::: {package}\n"


def _reference() -> str:
    """Return the reference of the contracts for the site: the headings of docs/reference.md, filled in by mkdocstrings."""
    parts = [HEAD]
    for name in MODULES:
        module = f"ddlcore.{name.replace('/', '.')}"
        parts.append(f"## `{module}`\n\n::: {module}\n    options:\n      heading_level: 3\n")
    return "\n".join(parts)
