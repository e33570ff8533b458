"""Declare to the core what ddl_gloo adds, as plain data. This module imports torch neither directly nor indirectly."""

from __future__ import annotations

from ddlcore.hooks import ReleaseRange, TransportProvider, hookimpl


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Return the description of the transport over TCP.

    The priority is lower than that of the transport over shared memory, which is many times faster, but works only on
    one host.
    """
    return [
        TransportProvider(
            name="gloo",
            target="ddl_gloo.transport:GlooTransport",
            requires=("torch",),
            install="pip install torch",
            tested=(ReleaseRange("torch", "2.10", "2.15"),),
            platforms=("linux",),
            doc="torch's Gloo, over TCP, between hosts or on one",
            priority=20,
            sizes=(2, None),
        )
    ]
