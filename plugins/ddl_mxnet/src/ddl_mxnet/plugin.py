"""Introduces ddl_mxnet to the core by data alone: it imports neither MXNet nor anything that does."""

from __future__ import annotations

from ddlcore.hooks import AdapterProvider, CheckProvider, hookimpl

__all__ = ["ddl_adapters", "ddl_checks"]


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """MXNet's tensors."""
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
    """For `ddl doctor`."""
    return [
        CheckProvider(
            "known-bad-mxnet", "ddl_mxnet.checks:KnownBadMxnet", doc="a numpy that MXNet cannot be imported with"
        )
    ]
