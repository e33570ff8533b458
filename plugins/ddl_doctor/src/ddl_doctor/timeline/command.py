"""Implement ``ddl timeline``: summarise a timeline that ``ddl run --timeline`` has written, or merge its parts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from ddl_doctor.recording.merge import merge as merge_parts
from ddl_doctor.timeline.page import page, sentences, tables
from ddl_doctor.timeline.reading import read_trace
from ddl_doctor.timeline.summary import summarise
from ddlcore.commands.help import Command, examples
from ddlcore.observe.timeline_parts import parts_in
from ddlcore.text.columns import aligned


@click.group(
    epilog=examples(
        ("ddl timeline summary trace.json", "where the time of the steps goes"),
        ("ddl timeline merge -o trace.zip trace.json", "one file for Perfetto"),
    ),
)
def timeline() -> None:
    """Read what `ddl run --timeline FILE` has written."""


@timeline.command(cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--html", "target", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page with charts."
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def summary(file: Path, target: Path | None, as_json: bool) -> None:
    """Show where the time of FILE's steps goes, and which ranks delay the others."""
    try:
        metadata, events = read_trace(file)
        found = summarise(metadata, events)
        if target is not None:
            target.write_text(page(file.name, found, metadata, events), encoding="utf-8")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        missing = f"no {error}" if isinstance(error, KeyError) else str(error)
        text = str(error) if isinstance(error, ValueError) else f"{file} is no trace that ddl wrote ({missing})"
        raise click.ClickException(f"ddl timeline: {text}") from None
    except OSError as error:
        raise click.ClickException(f"ddl timeline: {error.filename}: {error.strerror}") from None
    if not found.ranks:
        raise click.ClickException(f"ddl timeline: {file} holds no bucket; was init() called, and anything reduced?")
    if as_json:
        click.echo(json.dumps({"exposed": found.exposed, **asdict(found)}))
    else:
        _print(sentences(found), tables(found))
    if target is not None:
        click.echo(f"wrote {target}", err=True)


@timeline.command(cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Output file. [default: FILE]")
def merge(file: Path, output: Path | None) -> None:
    """Merge the parts that a job has left in FILE.ranks, or in the directory FILE, into one trace.

    With -o NAME.zip, each part becomes a file of an archive that Perfetto reads.
    """
    directory = file if file.is_dir() else file.with_name(file.name + ".ranks")
    parts = parts_in(directory)
    if not parts:
        raise click.ClickException(f"ddl timeline: there are no parts in {directory}")
    target = output or (file.with_suffix("") if file.is_dir() else file)
    try:
        for problem in merge_parts(parts, target):
            click.echo(f"ddl timeline: {problem}", err=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise click.ClickException(f"ddl timeline: {directory} holds what no rank wrote ({error})") from None
    except OSError as error:
        raise click.ClickException(f"ddl timeline: {error.filename}: {error.strerror}") from None
    click.echo(f"wrote {target} from {len(parts)} parts")


def _print(said: Sequence[str], shown: Sequence[tuple[str, list[str], list[list[str]]]]) -> None:
    for text in said:
        click.echo(text)
    if not sys.stdout.isatty():
        for title, head, rows in shown:
            click.echo(f"\n{title}")
            for line in aligned((head, *rows), right=range(1, len(head))):
                click.echo(line)
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    for title, head, rows in shown:
        table = Table(title=title, box=SIMPLE, title_justify="left")
        for i, name in enumerate(head):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*map(Text, row))  # a tensor may be called [/]
        Console().print(table)
