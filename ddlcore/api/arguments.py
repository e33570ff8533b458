"""Arguments that every framework's verbs share, resolved once: the reduction, and how values travel."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

from ddlcore.errors import InvalidArgument
from ddlcore.messages import BY_SETTING
from ddlcore.types import Adasum, Average, ReduceOp, Sum

__all__ = ["UserCompressor", "gradient_compression", "resolve_op", "wire_compression"]


class UserCompressor(Protocol):
    """A class of the user's own: what ``compress`` returns is reduced in the tensor's place."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor that travels, and whatever ``decompress`` needs to know."""

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The reduced tensor in its first type and shape."""


def resolve_op(op: int | None, average: bool | None = None, stacklevel: int = 3) -> ReduceOp:
    """The operation that ``op``, or its predecessor ``average``, asks for; Average where neither is given.

    Raises ValueError where both are, for an unknown operation, and for Adasum.
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
    """The core's compressor to name, and the user's own to run around it (None: there is none).

    ``compression`` is the name of a compressor; or a class that names one in ``wire``, as ``Compression.fp16``
    does (in the class itself: a subclass that compresses otherwise is the user's own); or a class with both
    methods. Raises ValueError for what is none of them.
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
    """Resolve the compression of gradients: as ``wire_compression``, and None leaves it to the job's setting.

    Optimizers, tapes and trainers describe their gradients by this, and nothing else does: what a user reduces
    by a verb is compressed only where the call says so. The setting is resolved by the coordinator, for all ranks.
    """
    return (BY_SETTING, None) if compression is None else wire_compression(compression)
