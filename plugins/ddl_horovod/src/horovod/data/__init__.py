"""Loaders that prepare batches while a step computes."""

from __future__ import annotations

from horovod.data.data_loader_base import (
    AsyncDataLoaderMixin,
    BaseDataLoader,
)

__all__ = [
    "AsyncDataLoaderMixin",
    "BaseDataLoader",
]
