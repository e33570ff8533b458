"""What every transport refuses: memory that address and count do not describe."""

from __future__ import annotations

import pytest

from ddlcore.contracts.transport import dense
from ddlcore.types import Buffer, DType


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3), None),
        ((2, 3), (3, 1)),
        ((2, 3), (1, 2)),
        ((2, 3, 4, 5), (60, 1, 15, 3)),  # channels last
        ((1, 3), (99, 1)),  # one row lies anywhere
        ((0, 3), (7, 2)),
        ((), ()),
    ],
)
def test_memory_without_gaps_passes(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    """In whatever order its axes lie."""
    count = 1
    for length in shape:
        count *= length
    dense(Buffer(64, count, DType.F32, shape, strides))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3,), (2,)), ((3,), (0,)), ((3,), (-1,)), ((2, 3), (4, 1)), ((2, 3), (1, 3)), ((1, 3), (3, 2))],
)
def test_memory_with_gaps_is_refused(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Also what overlaps, and what runs backwards; the error says which buffer it is, and what to do."""
    whole = Buffer(64, 3, DType.F32, (3,))
    with pytest.raises(ValueError, match=r"float32 buffer of shape .* and strides .* leaves gaps .*contiguous copy"):
        dense(whole, Buffer(64, shape[0] * shape[-1] if len(shape) > 1 else 3, DType.F32, shape, strides))
