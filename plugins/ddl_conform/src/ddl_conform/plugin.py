"""Declare to the core what ddl_conform adds, as plain data: two commands, and the transport of worlds of threads."""

from __future__ import annotations

from ddlcore.hooks import CommandProvider, TransportProvider, hookimpl


@hookimpl
def ddl_cli() -> list[CommandProvider]:
    """Return the providers of the commands."""
    return [
        CommandProvider("conform", "ddl_conform.conform.command:conform", doc="tests plugins"),
        CommandProvider("plugins new", "ddl_conform.new.command:new", doc="begins a package for a new plugin"),
    ]


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Return the provider of the transport between ranks that are threads of one process."""
    return [
        TransportProvider(
            name="threads",
            target="ddl_conform.threads:ThreadsTransport",
            doc="ranks that are threads of one process",
            in_process=True,
            sizes=(2, None),
        )
    ]
