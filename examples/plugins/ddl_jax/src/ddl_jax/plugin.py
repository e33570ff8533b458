"""Introduces ddl_jax to ddl by data alone: jax is not imported here."""

from __future__ import annotations

from ddlcore.hooks import AdapterProvider, hookimpl

__all__ = ["ddl_adapters"]


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """JAX's arrays."""
    return [
        AdapterProvider(
            name="jax",
            target="ddl_jax.adapter:JaxAdapter",
            doc="JAX arrays on the CPU",
            requires=("jax",),
            install="pip install jax",
            module="ddl_jax",
            framework="jax",
            suite="ddl_jax.conformance:JaxSuite",
        )
    ]
