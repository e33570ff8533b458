"""Declares ddl_gloo to the core as plain data; imports neither torch nor anything that imports it."""

from __future__ import annotations

from ddlcore.hooks import TransportProvider, hookimpl


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Return the provider of collectives over TCP.

    Its priority is lower than that of shared memory, which is many times faster on one host but works only there.
    """
    return [
        TransportProvider(
            name="gloo",
            target="ddl_gloo.transport:GlooTransport",
            requires=("torch",),
            install="pip install torch",
            platforms=("linux",),
            doc="torch's Gloo, over TCP, between hosts or on one",
            priority=20,
            sizes=(2, None),
        )
    ]
