"""Describes ddl_bysize to ddl without importing the fusion policy."""

from __future__ import annotations

from ddlcore.hooks import FusionProvider, hookimpl

__all__ = ["ddl_fusion_policies"]


@hookimpl
def ddl_fusion_policies() -> list[FusionProvider]:
    """Return the policy that `ddl run --fusion-policy bysize` uses."""
    return [FusionProvider("bysize", "ddl_bysize.fusion:BySizeFusion", doc="what is ready together, by size")]
