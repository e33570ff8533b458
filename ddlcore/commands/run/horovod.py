"""Offer horovodrun's flags as hidden options of ``ddl run``. launch/job/horovod.py defines the meaning of each flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ddlcore.launch.job.horovod import FLAGS, Answers, Foreign

_PLACE = "ddl.horovod"  # in click's context


def answers_of(ctx: click.Context) -> Answers:
    """Return ddl's settings, variables and messages that result from horovodrun's flags on this command line.

    The object is stored in ``ctx.meta``, so all calls for one command line return the same object.
    """
    given = ctx.meta.setdefault(_PLACE, Answers())
    assert isinstance(given, Answers)
    return given


def horovod_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: add a hidden option for each of horovodrun's flags in ``FLAGS``.

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
            raise click.ClickException(f"ddl run: {error}") from None
        if given.refusals:
            raise click.ClickException(f"ddl run: {given.refusals[0]}")

    return click.option(
        name,
        f"horovod_{name.strip('-').replace('-', '_')}",
        is_flag=row.values == 0,
        default=None,
        nargs=max(row.values, 1),
        expose_value=False,
        callback=note,
        hidden=True,
    )
