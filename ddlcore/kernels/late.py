"""The CPU kernels, loaded late: importing this module compiles and imports none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddlcore.contracts.kernels import Kernels
from ddlcore.types import DType, ReduceOp

if TYPE_CHECKING:
    from ddlcore.kernels.cpu import CpuKernels

__all__ = ["LateKernels"]


class LateKernels(Kernels):
    """CPU kernels that are imported and compiled when one of them is first called: a world of one rank may never need
    them.
    """

    def __init__(self, cache_dir: str) -> None:
        self._cache_dir = cache_dir
        self._kernels: CpuKernels | None = None

    def _load(self) -> CpuKernels:
        if self._kernels is None:
            from ddlcore.kernels.cpu import CpuKernels

            self._kernels = CpuKernels(self._cache_dir)
        return self._kernels

    def pack(
        self, sources: Sequence[int], counts: Sequence[int], dtype: DType, target: int, wire: DType, scale: float = 1.0
    ) -> None:
        self._load().pack(sources, counts, dtype, target, wire, scale)

    def unpack(
        self, source: int, wire: DType, targets: Sequence[int], counts: Sequence[int], dtype: DType, scale: float = 1.0
    ) -> None:
        self._load().unpack(source, wire, targets, counts, dtype, scale)

    def reduce(
        self,
        sources: Sequence[int],
        target: int,
        count: int,
        dtype: DType,
        op: ReduceOp,
        scale: float = 1.0,
        prescale: float = 1.0,
    ) -> None:
        self._load().reduce(sources, target, count, dtype, op, scale, prescale)

    def fill_identity(self, target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        self._load().fill_identity(target, count, dtype, op)

    def widen(self, source: int, count: int, dtype: DType, target: int, scale: float = 1.0) -> None:
        self._load().widen(source, count, dtype, target, scale)

    def mean(self, source: int, count: int, dtype: DType, target: int, divisor: int, scale: float = 1.0) -> None:
        self._load().mean(source, count, dtype, target, divisor, scale)

    def digests(self, addresses: Sequence[int], sizes: Sequence[int]) -> bytes:
        """Return what ``CpuKernels.digests`` returns."""
        return self._load().digests(addresses, sizes)
