"""CUDA devices for ddl: kernels that numba compiles, and streams, events and memory through CUDA's driver API."""

from __future__ import annotations

__all__: list[str] = []
