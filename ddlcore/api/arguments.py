"""Checks and converts two arguments of the collectives of all frameworks: the operation and the compression."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

from ddlcore.errors import InvalidArgument
from ddlcore.messages.spec import BY_SETTING
from ddlcore.types import Adasum, Average, ReduceOp, Sum

__all__ = ["UserCompressor", "gradient_compression", "resolve_op", "wire_compression"]


class UserCompressor(Protocol):
    """A compressor that the user has written, as a class with two static methods.

    ddl reduces the tensor that ``compress`` returns, and then passes the reduced tensor to ``decompress``.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to reduce instead of ``tensor``, and an object of any type that ``decompress`` needs."""

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return ``tensor``, the reduced tensor, converted back to the original type and shape.

        ``ctx`` is the object that ``compress`` returned.
        """


def resolve_op(op: int | None, average: bool | None = None, stacklevel: int = 3) -> ReduceOp:
    """Return the reduce operation that a caller has chosen by ``op``, or by the deprecated argument ``average``.

    For both arguments, None means that the caller has not given the argument. If neither is given, return Average.
    ``stacklevel``: the argument of ``warnings.warn`` for the warning that ``average`` is deprecated. Raises ValueError
    if both arguments are given, if ``op`` is unknown, or if ``op`` is Adasum.
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
        raise InvalidArgument("op=Adasum is not supported here, but by ddl-horovod; use op=Average or op=Sum")
    return resolved


def wire_compression(compression: Any) -> tuple[str, UserCompressor | None]:
    """Convert an argument ``compression`` to two values: the name of a compressor of ddl, and the user's compressor.

    The user's compressor is None unless the user has passed one. If the user has passed one, the name is "none", and
    the caller must call ``compress`` before the reduction and ``decompress`` after it.

    ``compression`` is one of three things: the name of a compressor of ddl; a class with such a name in its attribute
    ``wire``, such as ``Compression.fp16``; or a class with both methods of UserCompressor. An inherited ``wire`` is
    ignored: a subclass may compress in another way, so a subclass counts as the user's compressor. Raises ValueError
    for any other value.
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
    """Do the same as ``wire_compression``, but accept None, which means the compressor in the job's settings.

    If ``compression`` is None, return the name "setting". The coordinator replaces this name by the setting's value,
    the same for all ranks. Only optimizers, tapes and trainers use this function, for their gradients. If a user calls
    a collective, the tensor is compressed only if that call has an argument ``compression``.
    """
    return (BY_SETTING, None) if compression is None else wire_compression(compression)
