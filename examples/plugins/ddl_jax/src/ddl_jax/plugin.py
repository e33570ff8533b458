"""Describes ddl_jax to ddl without importing jax."""

from __future__ import annotations

from ddlcore.hooks import AdapterProvider, hookimpl

__all__ = ["ddl_adapters"]


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """Return the adapter of JAX's arrays."""
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
