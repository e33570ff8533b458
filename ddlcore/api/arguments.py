"""Resolves the arguments that the verbs of all frameworks share: the reduction operation and the compression."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

from ddlcore.errors import InvalidArgument
from ddlcore.messages import BY_SETTING
from ddlcore.types import Adasum, Average, ReduceOp, Sum

__all__ = ["UserCompressor", "gradient_compression", "resolve_op", "wire_compression"]


class UserCompressor(Protocol):
    """A compressor class written by the user: the tensor that ``compress`` returns is reduced in place of the original
    one.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and any context that ``decompress`` needs."""

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the reduced tensor in its original type and shape."""


def resolve_op(op: int | None, average: bool | None = None, stacklevel: int = 3) -> ReduceOp:
    """Return the operation that ``op``, or the older argument ``average``, asks for; Average if neither is given.

    Raises ValueError if both are given, for an unknown operation, and for Adasum.
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
    """Return the name of a core compressor, and the user's own compressor to run around it (None if there is none).

    ``compression`` is one of: the name of a compressor; a class that has such a name in its attribute ``wire``, as
    ``Compression.fp16`` has; or a class with both methods of UserCompressor. ``wire`` counts only if it is defined in
    the class itself: a subclass that compresses in another way is a compressor of the user's own. Raises ValueError for
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
    """Resolve the compression of gradients: like ``wire_compression``, but None selects the job's setting.

    Only optimizers, tapes and trainers use it, for their gradients. A tensor that the user reduces with a verb is
    compressed only if that call asks for it. The coordinator resolves the setting for all ranks.
    """
    return (BY_SETTING, None) if compression is None else wire_compression(compression)
