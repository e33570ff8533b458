"""Floats as int8: each block of 256 values has one float32 scale; the rounding error is added to the next gradient.

Error feedback: Seide et al., 1-bit stochastic gradient descent, 2014; Karimireddy et al., Error feedback fixes SignSGD,
2019.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.transport import view
from ddlcore.types import Buffer, DType

__all__ = ["BLOCK", "Int8Compressor"]

Array = Any  # np.ndarray
BLOCK = 256  # values that share a scale
SCALE_BYTES = 4


class Int8Compressor(Compressor):
    """Sends the scales of all blocks, then one byte for each value.

    The rounding errors of each tensor are kept as float32, under the tensor's name.
    """

    name = "int8"
    summable = False

    def __init__(self, kernels: Any) -> None:
        super().__init__(kernels)
        self._rests: dict[str, Array] = {}
        self._staged: dict[str, Array] = {}  # rounding errors of the last encode, until it is committed

    def wire_dtype(self, dtype: DType) -> DType:
        return DType.I8 if dtype in (DType.F32, DType.F64) else dtype

    def encoded_count(self, dtype: DType, count: int) -> int:
        return count if self.wire_dtype(dtype) is dtype else SCALE_BYTES * _blocks(count) + count

    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        if self.wire_dtype(source.dtype) is source.dtype:
            self.kernels.pack([source.address], [source.count], source.dtype, target.address, target.dtype, scale)
            return
        values = np.zeros(_blocks(source.count) * BLOCK, np.float32)  # pads the last block with zeros
        self.kernels.pack([source.address], [source.count], source.dtype, values.ctypes.data, DType.F32, scale)
        rest = self._rests.get(name)
        if rest is not None and rest.size == values.size:
            values += rest
        blocks = values.reshape(-1, BLOCK)
        scales = np.abs(blocks).max(axis=1, initial=0.0) / np.float32(127)
        small = np.rint(blocks / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8)
        self._staged[name] = (blocks - small * scales[:, None]).reshape(-1)
        wire = _bytes(target)
        wire[: scales.nbytes] = scales.view(np.int8)
        wire[scales.nbytes :] = small.reshape(-1)[: source.count]

    def decode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        if source.dtype is target.dtype:
            self.kernels.unpack(source.address, source.dtype, [target.address], [target.count], target.dtype, scale)
            return
        wire = _bytes(source)
        head = SCALE_BYTES * _blocks(target.count)
        scales = wire[:head].view(np.float32)
        values = np.zeros(scales.size * BLOCK, np.float32)
        values[: target.count] = wire[head:]
        values.reshape(-1, BLOCK)[:] *= scales[:, None]
        self.kernels.unpack(values.ctypes.data, DType.F32, [target.address], [target.count], target.dtype, scale)

    def commit(self, name: str, valid: bool) -> None:
        staged = self._staged.pop(name, None)
        if valid and staged is not None:
            self._rests[name] = staged


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _bytes(buffer: Buffer) -> Array:
    return np.frombuffer(view(buffer.address, buffer.nbytes), np.int8)
