"""Every `ddl` command that a page shows is one: the subcommand exists and takes these options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from ddlcore.launch.cli import _ddl

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("README.md", "docs/**/*.md", "plugins/*/README.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
)


def commands(page: Path) -> list[str]:
    """Those in blocks of code, one a line, without comments; what stands in brackets is said to be optional."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            text = line.strip()
            if language == "python":
                if not text.startswith("# $ "):
                    continue
                text = text[4:]
            text = re.sub(r"\s#\s.*|[\[\]]", "", text.removeprefix("$ "))
            for part in text.split("&&"):
                words = part.strip()
                output = re.match(r"ddl \w+:", words)  # what ddl says begins so
                if words.startswith(("ddl ", ".venv/bin/ddl ")) and not output and "…" not in words:
                    found.append(words)
    return found


SHOWN = [
    pytest.param(command, id=f"{page.relative_to(ROOT)}: {command}") for page in PAGES for command in commands(page)
]


def test_pages_show_commands() -> None:
    assert len(SHOWN) > 40, "the commands are not found any more"


@pytest.mark.parametrize("command", SHOWN)
def test_it_is_a_command(command: str) -> None:
    words = shlex.split(command)[1:]
    group: click.Command = _ddl
    context = click.Context(_ddl, info_name="ddl")
    while isinstance(group, click.Group) and words and not words[0].startswith("-"):
        found = group.get_command(context, words[0])
        if found is None and group is not _ddl:  # of a group that is a command itself
            break
        assert found is not None, f"`ddl {words[0]}` does not exist"
        group = found
        words = words[1:]
    try:
        group.make_context("ddl", list(words))
    except click.exceptions.Exit:
        pass  # --version, say
    except click.UsageError as error:
        pytest.fail(f"{command}: {error.format_message()}")
