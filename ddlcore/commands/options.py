"""Offer the settings as command-line options, which are the same for every command that takes settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ddlcore.config import SETTINGS, Setting

_ALSO = {"network_interface": ("--network-interfaces",)}  # its name in horovodrun


def setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option for each of the core's settings. The value of an option that is not given is None."""
    for row in reversed(SETTINGS):
        function = _option(row)(function)
    return function


def _option(row: Setting) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    default = f"default {row.default}" if row.default != "" else "default: none"
    if row.type is bool:
        return click.option(
            f"{row.flag}/--no-{row.flag[2:]}", row.name, default=None, help=f"{row.doc} [{default}; {row.env}]"
        )
    kinds = {int: "N", float: "NUMBER", str: "TEXT"}
    metavar = "|".join(row.choices) if row.choices else kinds[row.type]
    return click.option(
        row.flag,
        *_ALSO.get(row.name, ()),
        *(["--" + row.former.replace("_", "-")] if row.former else []),
        row.name,
        default=None,
        metavar=metavar,
        help=f"{row.doc} [{default}; {row.env}]",
    )
