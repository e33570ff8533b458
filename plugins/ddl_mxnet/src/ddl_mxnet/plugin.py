"""Registers ddl_mxnet with the core as plain data; imports neither MXNet nor any module that imports MXNet."""

from __future__ import annotations

from ddlcore.hooks import AdapterProvider, CheckProvider, hookimpl


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """Register the adapter for MXNet arrays."""
    return [
        AdapterProvider(
            name="mxnet",
            target="ddl_mxnet.adapter:MxnetAdapter",
            requires=("mxnet",),
            install="pip install mxnet",
            doc="MXNet tensors",
            module="ddl_mxnet",
            framework="mxnet",
            loaders=("mxnet.gluon.data", "mxnet.io"),
            suite="ddl_mxnet.conformance:MxnetSuite",
        )
    ]


@hookimpl
def ddl_checks() -> list[CheckProvider]:
    """Register what `ddl doctor` checks for MXNet."""
    return [
        CheckProvider(
            "known-bad-mxnet", "ddl_mxnet.checks:KnownBadMxnet", doc="a numpy that MXNet cannot be imported with"
        )
    ]
