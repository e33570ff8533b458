"""Adapts docs/ to the site of ``make docs``, as a hook of MkDocs: adds pages, and leads links to them.

The pages of docs/ are written to be read in the repository. In the site, links to files outside docs/ lead to pages
that show these files, the reference of the contracts has signatures with links, and the public functions of the
packages have pages.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # MkDocs loads this file by its path

from tools.docs_site.outside import DOCS, PLACE, ROOT, outside_pages, rewritten, without_comments
from tools.reference import HEAD, INTERNAL, MODULES

__all__ = ["API", "Package", "on_files", "on_page_markdown", "on_post_page", "public_names"]


class Package(NamedTuple):
    """A public package that has a page."""

    name: str  # what a script imports
    folder: str  # where its source is
    # What mkdocstrings leaves out: modules, and functions that have the name of a module.
    more: tuple[str, ...] = ()


TF = "plugins/ddl_tf/src/ddl_tf"
API = {
    "api/ddlcore.md": Package("ddlcore", "ddlcore"),
    "api/ddl_torch.md": Package(
        "ddl_torch", "plugins/ddl_torch/src/ddl_torch", ("ddl_torch.ops.broadcast", "ddl_torch.elastic")
    ),
    "api/ddl_tf.md": Package("ddl_tf", TF, ("ddl_tf.ops.broadcast", "ddl_tf.version", "ddl_tf.elastic")),
    "api/ddl_tf_keras.md": Package("ddl_tf.keras", f"{TF}/keras", ("ddl_tf.keras.callbacks", "ddl_tf.keras.elastic")),
    "api/ddl_mxnet.md": Package(
        "ddl_mxnet", "plugins/ddl_mxnet/src/ddl_mxnet", ("ddl_mxnet.ops.broadcast", "ddl_mxnet.elastic")
    ),
}
REFERENCE = "reference.md"
# Tags that make a browser fetch something, with the address that they name.
FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=\"?(https?:[^\s\">]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for place, package in API.items():
        files.append(File.generated(config, place, content=_api_page(package)))
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
    """Refuse a page that would load anything from another server, and one that lacks a public name of its package."""
    found = FETCHED.search(output)
    if found is not None:
        raise PluginError(f"{page.file.src_uri}: the page loads {found[1]}; ship it with the site")
    if page.file.src_uri in API:
        package = API[page.file.src_uri]
        missing = [name for name in public_names(package) if f'.{name}"' not in output]
        if missing:
            raise PluginError(f"{page.file.src_uri}: {', '.join(missing)} of {package.name} have no place in the page")
    return output


def public_names(package: Package) -> list[str]:
    """Return the names in ``__all__`` of a package."""
    tree = ast.parse((ROOT / package.folder / "__init__.py").read_text(encoding="utf-8"))
    for item in tree.body:
        if isinstance(item, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in item.targets):
            return list(ast.literal_eval(item.value))
    raise PluginError(f"{package.folder}/__init__.py has no __all__")


def _api_page(package: Package) -> str:
    values = "      show_attribute_values: false\n"
    shown = [f"# {package.name}\n\n`import {package.name} as ddl`\n\n::: {package.name}\n    options:\n{values}"]
    heading = "    options:\n      show_root_heading: true\n      show_root_toc_entry: true\n      show_root_full_path: false\n"
    return "\n".join([*shown, *(f"::: {name}\n{heading}" for name in package.more)])


def _reference() -> str:
    """Return the reference of the contracts for the site: the headings of docs/reference.md, filled in by mkdocstrings."""
    parts = [HEAD]
    for module in MODULES:
        options = "heading_level: 3\n"
        if module.startswith("ddl_conform."):  # a suite without its tests
            hidden = ["^_", "^test_", "^(setup|teardown)_", f"^({'|'.join(sorted(INTERNAL))})$"]
            options += f"      filters: {json.dumps(['!' + one for one in hidden])}\n"
        parts.append(f"## `{module}`\n\n::: {module}\n    options:\n      {options}")
    return "\n".join(parts)
