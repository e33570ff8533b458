"""Implement ``ddl info``: show the facts as aligned tables or as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import click

from ddlcore.commands.help import Command, examples
from ddlcore.commands.info.facts import all_facts
from ddlcore.plug.settings import settings_of
from ddlcore.text.columns import aligned, indented, table


def _text(facts: Mapping[str, Any]) -> str:
    lines = [f"ddl {facts['ddlcore']}"]
    lines += ["", "machine", *indented(aligned(list(facts["machine"].items())))]
    for name, rows in facts.items():
        if name not in ("ddlcore", "machine", "problems"):
            lines += ["", name, *indented(table(rows))]
    if facts["problems"]:
        lines += ["", "problems", *indented(facts["problems"])]
    return "\n".join(lines)


@click.command(
    cls=Command,
    epilog=examples(
        ("ddl info", "tables"),
        ("ddl info --json | jq .transports", "the same for a program"),
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def info(as_json: bool) -> None:
    """Show the machine, the installed frameworks, transports and other parts, and how to install what is missing."""
    try:
        settings, registry = settings_of(os.environ)
    except ValueError as error:
        raise click.ClickException(f"ddl info: {error}") from None
    facts = all_facts(settings, registry)
    click.echo(json.dumps(facts, indent=2) if as_json else _text(facts))
