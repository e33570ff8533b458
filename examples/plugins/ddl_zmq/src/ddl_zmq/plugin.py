"""Describes ddl_zmq to ddl without importing zmq."""

from __future__ import annotations

from ddlcore.hooks import TransportProvider, hookimpl

__all__ = ["ddl_transports"]


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Return the transport that `ddl run --backend zmq` uses."""
    return [
        TransportProvider(
            name="zmq",
            target="ddl_zmq.transport:ZmqTransport",
            doc="ZeroMQ over TCP, between hosts or on one",
            requires=("zmq",),
            install="pip install pyzmq",
            priority=1,  # all other transports that span hosts are faster
            sizes=(2, None),
        )
    ]
