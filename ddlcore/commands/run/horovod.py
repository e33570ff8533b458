"""Offers horovodrun's flags as hidden options of ``ddl run``; launch/job/horovod.py says what each means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ddlcore.launch.job.horovod import FLAGS, Answers, Foreign

_PLACE = "ddl.horovod"  # in click's context


def answers_of(ctx: click.Context) -> Answers:
    """Return the settings and messages that result from the flags of ``horovod_options`` on this command line."""
    given = ctx.meta.setdefault(_PLACE, Answers())
    assert isinstance(given, Answers)
    return given


def horovod_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a hidden option for each name in ``FLAGS``. ``answers_of`` returns what the given options mean."""
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
