"""Copies of any length between any addresses: exactly these bytes change. From 2 KiB on, a loop of our own copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddlcore.kernels.cpu import CpuKernels
from ddlcore.types import DType

LENGTHS = [0, 1, 63, 2047, 2048, 2049, 2111, 2175, 2176, 4095, 65536, 65537, 1 << 20]
GUARD = 256  # bytes before and behind a target, which must stay


def _array(nbytes: int, offset: int, value: int | None = None) -> Any:
    """Return ``nbytes`` bytes that begin ``offset`` bytes behind a multiple of 64."""
    raw = np.random.default_rng(nbytes + offset).integers(0, 256, nbytes + 192, np.uint8)
    if value is not None:
        raw[:] = value
    begin = -raw.ctypes.data % 64 + offset
    return raw[begin : begin + nbytes]


@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("to", [0, 1, 31, 63])
@pytest.mark.parametrize("start", [0, 1, 40])
def test_exactly_these_bytes_are_copied(nbytes: int, to: int, start: int) -> None:
    source, whole = _array(nbytes, start), _array(nbytes + 2 * GUARD, to, 7)
    target = whole[GUARD : GUARD + nbytes]
    kernels = CpuKernels()
    kernels.pack([source.ctypes.data], [nbytes], DType.U8, target.ctypes.data, DType.U8)
    assert np.array_equal(target, source)
    assert (whole[:GUARD] == 7).all()
    assert (whole[GUARD + nbytes :] == 7).all()
