"""The flags of horovodrun that ``ddl run`` does not have, as options. tables.py defines the meaning of each flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ddl_horovod.tables import FLAGS, Answers, Foreign
from ddlcore.commands.help import PLUGINS_PLACE, Group, option

_PLACE = "ddl.horovod"  # in click's context
_GROUP = Group("Horovod", "further flags of Horovod's launcher, and their effects", PLUGINS_PLACE)


def answers_of(ctx: click.Context) -> Answers:
    """Return ddl's settings, variables and messages that result from horovodrun's flags on this command line.

    The object is stored in ``ctx.meta``, so all calls for one command line return the same object.
    """
    given = ctx.meta.setdefault(_PLACE, Answers())
    assert isinstance(given, Answers)
    return given


def horovod_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: add an option for each of horovodrun's flags in ``FLAGS``.

    A flag on the command line changes the object that ``answers_of`` returns.
    """
    for row in reversed(FLAGS):
        for name in reversed(row.names):
            function = _option(row, name)(function)
    return function


def _option(row: Foreign, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is None or value is False:
            return
        given = answers_of(ctx)
        text = " ".join(value) if isinstance(value, tuple) else str(value)
        try:
            row.answer(name, "1" if row.values == 0 else text, given)
        except ValueError as error:
            raise click.ClickException(f"horovodrun: {error}") from None
        if given.refusals:
            raise click.ClickException(f"horovodrun: {given.refusals[0]}")

    effect = (
        f"Set {row.environ}." if row.environ else row.note or row.later or f"Set --{row.setting.replace('_', '-')}."
    )
    return option(
        name,
        f"horovod_{name.strip('-').replace('-', '_')}",
        group=_GROUP,
        is_flag=row.values == 0,
        default=None,
        nargs=max(row.values, 1),
        metavar=" ".join(["VALUE"] * row.values),
        expose_value=False,
        callback=note,
        help=f"{effect[:1].upper()}{effect[1:]}",
    )
