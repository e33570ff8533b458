"""CUDA devices for ddl: the fusion kernels, compiled by numba, and streams, events and memory on the driver's API."""

from __future__ import annotations

__all__: list[str] = []
