"""The description of an operation, and the request of a rank to run it."""

from __future__ import annotations

from math import prod

import msgspec

from ddlcore.types import CPU, DType, Kind, ReduceOp, own_shape

PROTOCOL = 10  # version of the protocol; ranks and coordinator must have the same
BY_SETTING = "setting"  # value of Spec.compressor: the job's setting decides how the tensor is compressed
# Values of Spec.part_of: the ranks average by weights, whose sum they reduce beside the tensor, or by shares of 1.
BY_WEIGHT, BY_SHARE = "an average by weights", "an average by shares"


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """The description of an operation that a rank requests under one name. All ranks must send an equal description."""

    kind: Kind
    dtype: DType = DType.U8
    shape: tuple[int, ...] = ()  # for ragged kinds without the first dimension
    op: ReduceOp = ReduceOp.Sum
    root: int = -1  # world rank of the source of a broadcast
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    strides: tuple[int, ...] | None = None
    compressor: str = "none"  # BY_SETTING: see ``compressor_by``
    group: int = 0  # number of tensors in the grouped call, whose name is the tensor's up to the last "["
    ranks: tuple[int, ...] | None = None  # for ADD_SET the members; for REMOVE_SET (set id,)
    part_of: str = ""  # caller's text that says of what the tensor is a part; must be equal on all ranks
    is_object: bool = False  # the bytes of an object
    is_announced: bool = False  # the digest of the object is announced over the control network
    element: str = ""  # usual name of the tensor's own element type, if ``dtype`` and ``shape`` are its carrier's
    of_members: bool = False  # for ADD_SET and REMOVE_SET: only the members of the set ask, and know the set
    rows: tuple[int, ...] | None = None  # for ragged kinds: the rows that every rank announces, if they are equal

    @property
    def label(self) -> str:
        """The usual name of the tensor's own element type."""
        return self.element or self.dtype.label

    @property
    def extents(self) -> tuple[int, ...]:
        """The tensor's own shape; for ragged kinds without the first dimension. See ``own_shape``."""
        return own_shape(self.shape, self.element)

    @property
    def is_negotiated(self) -> bool:
        """Whether the ranks must ask the coordinator about this operation in every step, even in replay.

        There are two reasons to ask. For an object whose bytes leave a host, the coordinator sends the digest to the
        receivers, since others might write to the data network. For a tensor of
        a ragged kind (allgather, alltoall) on a device, the coordinator sends the number of rows of each rank, because
        memory for the result is allocated before the device's queue reaches the collective. For a tensor in host
        memory, the ranks exchange the numbers of rows by the transport instead.
        """
        return self.kind.is_ragged and (self.is_announced or self.device != CPU.kind)

    def nbytes(self, rows: tuple[int, ...] = ()) -> int:
        """Return the size of the tensor in bytes.

        ``rows``: for ragged kinds (allgather, alltoall), the number of rows from each member, because a spec of a
        ragged kind does not contain the first dimension. For other kinds, ``rows`` is not used.
        """
        return prod(self.shape) * self.dtype.itemsize * (sum(rows) if self.kind.is_ragged else 1)

    def compressor_by(self, setting: str) -> str:
        """Return the name of the compressor for this tensor. ``setting``: the compressor that the job's settings name.

        If this spec names a compressor, return that compressor. ``compressor`` is BY_SETTING for gradients for which
        the user has named no compressor. In this case, return ``setting`` for a sum or an average of float32, and
        "none" for any other operation.
        """
        if self.compressor != BY_SETTING:
            return self.compressor
        sums = self.kind is Kind.ALLREDUCE and self.op in (ReduceOp.Sum, ReduceOp.Average)
        return setting if sums and self.dtype is DType.F32 and not self.element else "none"


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The request of one rank to reduce or send one tensor, which is ready on that rank."""

    set_id: int
    name: str
    spec: bytes  # an encoded Spec: the coordinator compares bytes, and decodes each different value once
    rows: tuple[int, ...] = ()  # allgather: (rows,); alltoall: rows to each member; other kinds: ()
    stamp: int = -1  # index of the last bucket whose completion the user's code has seen
    digest: bytes = b""  # digest of an object's bytes: receivers accept only bytes that match it
