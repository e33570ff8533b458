"""The commands of all pages get our packages from a clone or from wheels: no index has them, and anybody could put some there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {path.parent.name.replace("_", "-") for path in ROOT.glob("plugins/*/pyproject.toml")} | {"ddlcore"}
PAGES = [
    ROOT / "README.md",
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("plugins/*/README.md"),
    *ROOT.glob("examples/**/*.py"),
]


def by_name(text: str) -> list[str]:
    """The commands in ``text`` that ask an index for a package of ours."""
    found = re.findall(r"pip\d? (?:install|download|wheel)\b[^`\n]*", text)
    names = re.compile(rf"(?<![\w./-])(?:{'|'.join(OURS)})(?![\w./-])")
    return [line for line in found if "--no-index" not in line and names.search(line.partition(" #")[0])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_asks_an_index_for_our_packages(page: Path) -> None:
    assert by_name(page.read_text()) == []


def test_such_commands_are_found() -> None:
    """Others are let through."""
    bad = ["pip install ddlcore", "pip install . 'ddl-mpi[mpich]'", "pip3 download torch ddl-gloo"]
    good = [
        "pip install . './plugins/ddl_mpi[mpich]'",
        "pip install --no-index --find-links w ddlcore",
        "pip install x # ddlcore",
    ]
    assert by_name("\n".join([*bad, *good])) == bad
