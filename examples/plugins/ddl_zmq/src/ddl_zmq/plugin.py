"""Introduces ddl_zmq to ddl by data alone: zmq is not imported here."""

from __future__ import annotations

from ddlcore.hooks import TransportProvider, hookimpl

__all__ = ["ddl_transports"]


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """What `ddl run --backend zmq` uses."""
    return [
        TransportProvider(
            name="zmq",
            target="ddl_zmq.transport:ZmqTransport",
            doc="ZeroMQ over TCP, between hosts or on one",
            requires=("zmq",),
            install="pip install pyzmq",
            priority=1,  # whatever else spans hosts is faster
            sizes=(2, None),
        )
    ]
