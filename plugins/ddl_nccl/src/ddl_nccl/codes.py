"""NCCL's numbers for types, reduce operations and results, as in its header nccl.h. They have never changed."""

from __future__ import annotations

from collections.abc import Mapping

from ddlcore.contracts.transport import ALL_OPS
from ddlcore.types import DType, ReduceOp

BYTES = 1  # ncclUint8: for data that is only moved

TYPES: Mapping[DType, int] = {
    DType.I8: 0,
    DType.U8: 1,
    DType.I32: 2,
    DType.I64: 4,
    DType.F16: 6,
    DType.F32: 7,
    DType.F64: 8,
    DType.BF16: 9,
}

OPS: Mapping[ReduceOp, int] = {
    ReduceOp.Sum: 0,
    ReduceOp.Product: 1,
    ReduceOp.Max: 2,
    ReduceOp.Min: 3,
    ReduceOp.Average: 4,
}

# A bool is a byte of 0 or 1, so "any" is the maximum and "all" is the minimum.
CARRIED: Mapping[ReduceOp, int] = {
    ReduceOp.Sum: OPS[ReduceOp.Max],
    ReduceOp.Max: OPS[ReduceOp.Max],
    ReduceOp.Product: OPS[ReduceOp.Min],
    ReduceOp.Min: OPS[ReduceOp.Min],
}

ORDERED = (ReduceOp.Min, ReduceOp.Max)
SIXTEEN_BITS = (DType.F16, DType.BF16)

SUCCESS, IN_PROGRESS = 0, 7
REMOTE_ERROR = 6
RESULTS = (
    "success",
    "unhandled cuda error",
    "unhandled system error",
    "internal error",
    "invalid argument",
    "invalid usage",
    "remote process exited or there was a network error",
    "in progress",
    "timeout",
)


def native(sixteen_bits: bool) -> frozenset[tuple[DType, ReduceOp]]:
    """Return the (type, operation) pairs that NCCL itself reduces with the results that ddl promises.

    ``sixteen_bits``: whether the user allows NCCL to add in 16 bits. If so, the pairs with 16-bit floats are also
    returned.
    """
    pairs = {(dtype, op) for dtype in TYPES for op in ALL_OPS if not (dtype.is_float and op in ORDERED)}
    pairs |= {(dtype, ReduceOp.Average) for dtype in TYPES if dtype.is_float}
    return frozenset((dtype, op) for dtype, op in pairs if sixteen_bits or dtype not in SIXTEEN_BITS)
