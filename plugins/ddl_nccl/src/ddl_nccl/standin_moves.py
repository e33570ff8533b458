"""Executes the collectives of the stand-in for NCCL on host memory, with the same weaknesses as NCCL."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

TYPES: dict[int, Any] = {
    0: np.int8, 1: np.uint8, 2: np.int32, 4: np.int64, 6: np.float16, 7: np.float32, 8: np.float64,
    9: ml_dtypes.bfloat16,
}  # fmt: skip
SUM, PROD, MAX, MIN, AVG = range(5)


@dataclass(frozen=True)
class Asked:
    """One call of a rank: a collective or a message. For a message, ``root`` is the other rank."""

    kind: str
    source: int
    target: int
    count: int
    dtype: int
    op: int = SUM
    root: int = -1

    @property
    def said(self) -> str:
        """Those properties of the call that must be equal on all ranks, as a text."""
        return f"{self.kind} of {self.count} of type {self.dtype} by op {self.op}, root {self.root}"

    def spans(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks of memory that the call uses, as pairs (address, number of bytes).

        ``size`` is the number of ranks.
        """
        nbytes = self.count * np.dtype(TYPES[self.dtype]).itemsize
        if self.source:
            yield self.source, nbytes * (size if self.kind == "reduce_scatter" else 1)
        if self.target:
            yield self.target, nbytes * (size if self.kind == "all_gather" else 1)


def memory(address: int, count: int, dtype: int) -> Any:
    """Return the ``count`` elements at ``address`` as an array that shares the memory.

    ``dtype`` is NCCL's code of the type.
    """
    kind: Any = np.dtype(TYPES[dtype])
    raw: Any = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(raw, np.uint8).view(kind)


def carry_out(parts: Sequence[Asked]) -> None:
    """Execute a collective that all ranks have called. ``parts`` are the calls of the ranks, by rank."""
    one, size = parts[0], len(parts)
    if one.kind == "broadcast":
        values = memory(parts[one.root].source, one.count, one.dtype).copy()
        results = [values] * size
    elif one.kind == "all_gather":
        results = [np.concatenate([memory(part.source, one.count, one.dtype) for part in parts])] * size
    else:
        length = one.count * (size if one.kind == "reduce_scatter" else 1)
        whole = _fold([memory(part.source, length, one.dtype).copy() for part in parts], one.op)
        results = [whole[i * one.count :][: one.count] if length != one.count else whole for i in range(size)]
    for part, result in zip(parts, results):
        if part.target:
            memory(part.target, result.size, one.dtype)[:] = result


def _fold(arrays: Sequence[Any], op: int) -> Any:
    """Reduce the arrays like a ring of ranks: beginning with the second rank, with a rounding at every hop.

    For the minimum and the maximum, a number wins over a NaN, as in NCCL. ``op`` is NCCL's code of the operation.
    """
    function: Any = {SUM: np.add, AVG: np.add, PROD: np.multiply, MAX: np.fmax, MIN: np.fmin}[op]
    kind = arrays[0].dtype
    if op == AVG:
        arrays = [(array / len(arrays)).astype(kind) for array in arrays]
    total = arrays[1 % len(arrays)]
    with np.errstate(all="ignore"):
        for i in range(2, len(arrays) + 1):
            total = function(total, arrays[i % len(arrays)]).astype(kind) if len(arrays) > 1 else total
    return total
