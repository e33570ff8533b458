"""Introduces ddl_gloo to the core by data alone: it imports neither torch nor anything that does."""

from __future__ import annotations

from ddlcore.hooks import TransportProvider, hookimpl

__all__ = ["ddl_transports"]


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Collectives over TCP.

    Its priority is below shared memory's, which is many times faster on one host and cannot leave it.
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
