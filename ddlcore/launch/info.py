"""Implement ``ddl info``: show the facts as aligned tables or as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ddlcore.launch.facts import all_facts
from ddlcore.plug.settings import settings_of

__all__ = ["info", "table"]


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table with aligned columns. Columns that are empty in all rows are left out."""
    columns = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    lines = ["  ".join(name.ljust(widths[name]) for name in columns)]
    lines += ["  ".join(row[name].ljust(widths[name]) for name in columns) for row in rows]
    return [line.rstrip() for line in lines] if rows else []


def _text(facts: Mapping[str, Any]) -> str:
    lines = [f"ddl {facts['ddlcore']}"]
    width = max(len(name) for name in facts["machine"])
    lines += ["", "machine", *(f"  {name.ljust(width)}  {value}" for name, value in facts["machine"].items())]
    for name, rows in facts.items():
        if name not in ("ddlcore", "machine", "problems"):
            lines += ["", name, *(f"  {line}" for line in table(rows))]
    if facts["problems"]:
        lines += ["", "problems", *(f"  {problem}" for problem in facts["problems"])]
    return "\n".join(lines)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def info(as_json: bool) -> None:
    """Show machine, frameworks, transports and the rest, and what is missing to use them."""
    try:
        settings, registry = settings_of(os.environ)
    except ValueError as error:
        raise click.ClickException(f"ddl info: {error}") from None
    facts = all_facts(settings, registry)
    click.echo(json.dumps(facts, indent=2) if as_json else _text(facts))
