"""Digests of memory: the same for the same bytes wherever they lie, others for any change."""

from __future__ import annotations

import numpy as np
import pytest

from ddlcore.kernels.cpu import CpuKernels

KERNELS = CpuKernels(late=True)


def digest(data: bytes, shift: int = 0) -> bytes:
    memory = np.frombuffer(bytes(64 + shift) + data + bytes(8), np.uint8)[64 + shift :]
    return KERNELS.digests([memory.ctypes.data], [len(data)])


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 9, 31, 32, 33, 63, 64, 100, 4097])
def test_bytes_alone_count(size: int) -> None:
    """Neither where they lie nor what lies behind them."""
    data = np.random.default_rng(size).bytes(size)
    assert len({digest(data, shift) for shift in range(9)}) == 1


@pytest.mark.parametrize("size", [1, 4, 8, 12, 32, 40, 67])
def test_every_single_bit_counts(size: int) -> None:
    """A flipped bit, anywhere, gives another digest, and no two of them the same."""
    data = bytearray(np.random.default_rng(size).bytes(size))
    seen = {digest(bytes(data))}
    for bit in range(8 * size):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(digest(bytes(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * size


def test_changes_do_not_cancel_each_other() -> None:
    """Two signs that turn, in any two of 64 elements, and two elements that change places."""
    values = np.random.default_rng(3).standard_normal(64)
    seen, count = {digest(values.tobytes())}, 1
    for i in range(64):
        for j in range(i):
            turned, swapped = values.copy(), values.copy()
            turned[[i, j]] *= -1
            swapped[[i, j]] = swapped[[j, i]]
            seen |= {digest(turned.tobytes()), digest(swapped.tobytes())}
            count += 2
    assert len(seen) == count


def test_length_counts_and_order_of_stretches_stands() -> None:
    """Zeros of other lengths differ; of many stretches each has its own 8 bytes, in their order."""
    assert len({digest(bytes(n)) for n in range(100)}) == 100
    arrays = [np.full(n, n, np.float32) for n in (1, 5, 700)]
    together = KERNELS.digests([a.ctypes.data for a in arrays], [a.nbytes for a in arrays])
    assert together == b"".join(KERNELS.digests([a.ctypes.data], [a.nbytes]) for a in arrays)
    assert KERNELS.digests([], []) == b""
