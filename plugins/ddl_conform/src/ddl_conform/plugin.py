"""Declare to the core what ddl_conform adds, as plain data: a command, and a subcommand of another one."""

from __future__ import annotations

from ddlcore.hooks import CommandProvider, hookimpl


@hookimpl
def ddl_cli() -> list[CommandProvider]:
    """Return the providers of the commands."""
    return [
        CommandProvider("conform", "ddl_conform.conform.command:conform", doc="tests plugins"),
        CommandProvider("plugins new", "ddl_conform.new.command:new", doc="begins a package for a new plugin"),
    ]
