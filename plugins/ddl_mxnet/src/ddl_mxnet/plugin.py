"""Registers ddl_mxnet with the core. This module does not import MXNet, neither directly nor through other modules."""

from __future__ import annotations

from ddlcore.hooks import AdapterProvider, CheckProvider, ReleaseRange, hookimpl


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """Return the provider of the adapter for MXNet arrays."""
    return [
        AdapterProvider(
            name="mxnet",
            target="ddl_mxnet.adapter:MxnetAdapter",
            requires=("mxnet",),
            install="pip install mxnet",
            probe="ddl_mxnet.version:objection",
            doc="MXNet tensors",
            module="ddl_mxnet",
            framework="mxnet",
            tested=(ReleaseRange("mxnet", "1.9.1", "1.9.1"),),
            loaders=("mxnet.gluon.data", "mxnet.io"),
            suite="ddl_mxnet.conformance:MxnetSuite",
        )
    ]


@hookimpl
def ddl_checks() -> list[CheckProvider]:
    """Return the provider of the check of `ddl doctor` that looks for versions which do not work with MXNet."""
    return [
        CheckProvider(
            "known-bad-mxnet", "ddl_mxnet.checks:KnownBadMxnet", doc="a numpy that MXNet cannot be imported with"
        )
    ]
