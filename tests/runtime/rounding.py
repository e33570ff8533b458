"""Compressors that note what they are called for: one that is not summable, with error feedback, and one that is."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.transport import view
from ddlcore.types import Buffer, DType

__all__ = ["Noting", "Rounding"]


class Rounding(Compressor):
    """A float32 travels as its nearest whole number, an int8, behind one more that says how many there are, modulo 100."""

    name = "rounding"
    summable = False

    def __init__(self, kernels: Any) -> None:
        super().__init__(kernels)
        self.rests: dict[str, Any] = {}
        self.staged: dict[str, Any] = {}
        self.log: list[tuple[str, str]] = []  # (what, name)

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.I8 if dtype is DType.F32 else dtype

    def encoded_count(self, dtype: DType, count: int) -> int:
        return count + 1 if dtype is DType.F32 else count

    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        assert target.count == source.count + 1
        assert name not in self.staged, f"{name} is encoded again before its verdict"
        self.log.append(("encode", name))
        values = _array(source, np.float32) * scale + self.rests.get(name, 0)
        whole = np.rint(values)
        self.staged[name] = values - whole
        out = _array(target, np.int8)
        out[0], out[1:] = source.count % 100, whole

    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        values = _array(source, np.int8)
        assert values[0] == target.count % 100, "not what was encoded"
        _array(target, np.float32)[:] = values[1:] * np.float32(scale)

    def commit(self, name: str, valid: bool) -> None:
        self.log.append(("valid" if valid else "void", name))
        staged = self.staged.pop(name)
        if valid:
            self.rests[name] = staged


def _array(buffer: Buffer, dtype: Any) -> Any:
    return np.frombuffer(view(buffer.address, buffer.nbytes), dtype)


class Noting(Compressor):
    """Summable, float32 as 16 bits, and it notes what it is told: every ``encode`` of a name must get one verdict."""

    name = "noting"
    made: ClassVar[list[Noting]] = []

    def __init__(self, kernels: Any) -> None:
        super().__init__(kernels)
        self.open: set[str] = set()
        self.log: list[tuple[str, str]] = []
        Noting.made.append(self)

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.F16 if dtype is DType.F32 else dtype

    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.log.append(("encode", name))
        if name in self.open:
            self.log.append(("missed", name))
        self.open.add(name)
        self.kernels.pack([source.address], [source.count], source.dtype, target.address, target.dtype, scale)

    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        self.kernels.unpack(source.address, source.dtype, [target.address], [target.count], target.dtype, scale)

    def commit(self, name: str, valid: bool) -> None:
        self.log.append(("valid" if valid else "void", name))
        self.open.remove(name)
