"""Checks and converts two arguments that the verbs of all frameworks have: the operation and the compression."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

from ddlcore.errors import InvalidArgument
from ddlcore.messages import BY_SETTING
from ddlcore.types import Adasum, Average, ReduceOp, Sum

__all__ = ["UserCompressor", "gradient_compression", "resolve_op", "wire_compression"]


class UserCompressor(Protocol):
    """A compressor that the user has written, as a class with two static methods.

    The tensor that ``compress`` returns is reduced instead of the original one.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to reduce, and an object that ``decompress`` needs, of any type."""

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the reduced tensor in its original type and shape.

        ``ctx`` is the object that ``compress`` returned.
        """


def resolve_op(op: int | None, average: bool | None = None, stacklevel: int = 3) -> ReduceOp:
    """Return the operation for the arguments ``op`` and ``average``, an older one; Average if neither is given.

    Raises ValueError if both are given, for an unknown operation, and for Adasum. ``stacklevel``: for the warning that
    ``average`` is deprecated.
    """
    if op is None:
        if average is None:
            return Average
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed; use op=Average or op=Sum",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        return Average if average else Sum
    if average is not None:
        raise InvalidArgument("The op parameter supersedes average. Please provide only one of them.")
    resolved = ReduceOp(op)
    if resolved is Adasum:
        raise InvalidArgument("op=Adasum is not supported yet; use op=Average or op=Sum")
    return resolved


def wire_compression(compression: Any) -> tuple[str, UserCompressor | None]:
    """Return the name of a compressor of ddl, and the user's own compressor (None if there is none).

    If there is one, the name is "none", and the caller must use the user's compressor before and after the reduction.
    ``compression`` is one of: the name of a compressor; a class that has such a name in its attribute ``wire``, as
    ``Compression.fp16`` has; or a class with both methods of UserCompressor. ``wire`` is used only if the class itself
    defines it: a subclass may compress in another way, so it counts as a compressor of the user. Raises ValueError for
    anything else.
    """
    if isinstance(compression, str):
        return compression, None
    wire = getattr(compression, "__dict__", {}).get("wire")
    if isinstance(compression, type) and isinstance(wire, str):
        return wire, None
    if callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None)):
        return "none", compression
    raise InvalidArgument(
        f"compression={compression!r}: use Compression.none, .fp16 or .bf16, the name of a compressor, "
        "or a class with static methods compress(tensor) and decompress(tensor, ctx)"
    )


def gradient_compression(compression: Any) -> tuple[str, UserCompressor | None]:
    """Do the same as ``wire_compression``, but for None return the name that stands for the job's setting.

    Only optimizers, tapes and trainers use this, for their gradients. A tensor that the user reduces with a verb is
    compressed only if that call asks for it. The coordinator resolves the setting for all ranks.
    """
    return (BY_SETTING, None) if compression is None else wire_compression(compression)
