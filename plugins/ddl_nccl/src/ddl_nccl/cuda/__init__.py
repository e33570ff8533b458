"""CUDA devices for ddl: fusion kernels that numba compiles, and streams, events and memory by CUDA's driver API."""

from __future__ import annotations

__all__: list[str] = []
