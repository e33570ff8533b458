"""Runs an allreduce of encoded values that cannot be added: each rank decodes and adds one piece of every tensor.

Each tensor is cut into as many pieces as there are ranks. Every rank encodes its pieces and sends each piece to the
rank that must add this piece (alltoallv). That rank decodes the pieces of all ranks, adds them in the order of ranks,
and encodes the sum. The addition is in float32, or in float64 for float64 tensors. Then all ranks gather the sums
(allgatherv). Until the returned ``Summed`` object is called, only transport memory changes. The compressor's state is
committed when it is known whether the bucket is valid or void.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.messages.spec import Spec
from ddlcore.runtime.encoding import encode_once, state_name
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.process_sets import Communicator
from ddlcore.runtime.request import Entry
from ddlcore.runtime.transport_calls import finish, new_memory
from ddlcore.types import Buffer, DType, ReduceOp


@dataclass(frozen=True)
class _Piece:
    """The part of a tensor that one rank adds. All numbers are in elements."""

    begin: int
    count: int
    encoded: int  # the number of elements of the wire type after encoding


class Sharder:
    """Runs allreduces whose encoded values cannot be added. Only the thread that runs buckets uses this object."""

    def __init__(self, kernels: Kernels, meter: Meter) -> None:
        self._kernels, self._meter = kernels, meter
        self._open: set[tuple[int, str]] = set()  # (compressor, name) that were encoded and are not decided yet

    def allreduce(
        self,
        communicator: Communicator,
        compressor: Compressor,
        names: Sequence[str],
        entries: Sequence[Entry | None],
        specs: Sequence[Spec],
        counts: Sequence[int],
        use: str,
        postscale: float,
    ) -> Summed:
        """Take part in the allreduce. Return an object whose call writes the sums into the entries' targets.

        If this rank has no entry for a tensor, it contributes zeros. ``counts`` are the numbers of elements of the
        tensors. ``use`` names the fusion buffer that contains the sums until the returned object is called.
        ``postscale`` is the factor by which the sums are multiplied when they are written into the targets.
        """
        size, me, dtype = len(communicator.ranks), communicator.rank, specs[0].dtype
        wire = compressor.wire_dtype(dtype)
        names = [state_name(communicator.set_id, name) for name in names]
        pieces = [_pieces(count, size, dtype, compressor) for count in counts]
        shards = [sum(tensor[rank].encoded for tensor in pieces) for rank in range(size)]  # elements per shard
        summed = Summed(self, compressor, names, entries, pieces, postscale, self._meter)
        begun_ns = now_ns()
        sent = communicator.buffers.get("shards", sum(shards), wire)
        for rank, i, part in _walk(pieces, sent, range(size)):
            self._encode_piece(summed, i, rank, part, dtype, specs[i].prescale)
        self._meter.pack_ns += now_ns() - begun_ns
        came = communicator.buffers.get("shards of others", size * shards[me], wire)
        finish(communicator.transport.alltoallv(sent, came, [shards] * size))
        begun_ns = now_ns()
        mine = communicator.buffers.get("shard sums", shards[me], wire)
        self._add(summed, [_cut(came, rank * shards[me], shards[me]) for rank in range(size)], mine, me, dtype)
        self._meter.unpack_ns += now_ns() - begun_ns
        gathered = communicator.buffers.get(use, sum(shards), wire)
        finish(communicator.transport.allgatherv(mine, gathered, shards))
        summed.parts = [part for _, _, part in _walk(pieces, gathered, range(size))]
        return summed

    def _encode_piece(self, summed: Summed, i: int, rank: int, part: Buffer, dtype: DType, scale: float) -> None:
        entry, piece = summed.entries[i], summed.pieces[i][rank]
        if entry is not None and entry.source is not None:
            source = _cut(entry.source, piece.begin, piece.count)
            self._encode(summed, _part_name(summed.names[i], rank), source, part, scale)
        else:
            nothing = new_memory(piece.count, dtype)
            self._kernels.fill_identity(nothing.address, nothing.count, dtype, ReduceOp.Sum)
            encode_once(summed.compressor, nothing, part, 1.0)

    def _add(self, summed: Summed, came: Sequence[Buffer], mine: Buffer, me: int, dtype: DType) -> None:
        """Decode and add the pieces that all ranks have sent to this rank, and write the encoded sums into ``mine``.

        ``came[r]`` contains one piece of each tensor from rank r. ``me`` is this rank's number in the process set.
        """
        sums = DType.F64 if dtype is DType.F64 else DType.F32
        at = 0
        for name, tensor in zip(summed.names, summed.pieces):
            piece = tensor[me]
            if not piece.count:
                continue
            decoded = [new_memory(piece.count, sums) for _ in came]
            for shard, target in zip(came, decoded):
                summed.compressor.decode(_part_name(name, me), _cut(shard, at, piece.encoded), target, 1.0)
            total = decoded[0]
            self._kernels.reduce([d.address for d in decoded], total.address, piece.count, sums, ReduceOp.Sum)
            self._encode(summed, _part_name(name, "sum"), total, _cut(mine, at, piece.encoded), 1.0)
            at += piece.encoded

    def _encode(self, summed: Summed, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        if not name:
            encode_once(summed.compressor, source, target, scale)
            return
        key = (id(summed.compressor), name)
        if key in self._open:  # its bucket was void, but nobody called ``void``, as this rank had no data in it
            summed.compressor.commit(name, False)
        self._open.add(key)
        summed.encoded.append(name)
        summed.compressor.encode(name, source, target, scale)

    def settle(self, compressor: Compressor, names: Sequence[str], valid: bool) -> None:
        """Tell the compressor whether a bucket is valid (not void). Its values were encoded under ``names``."""
        for name in names:
            if (id(compressor), name) in self._open:
                self._open.discard((id(compressor), name))
                compressor.commit(name, valid)


class Summed:
    """A bucket whose encoded sums are in transport memory. Calling this object writes the sums into the tensors."""

    def __init__(
        self,
        sharder: Sharder,
        compressor: Compressor,
        names: Sequence[str],
        entries: Sequence[Entry | None],
        pieces: Sequence[Sequence[_Piece]],
        postscale: float,
        meter: Meter,
    ) -> None:
        self.compressor, self.names, self.entries, self.pieces = compressor, names, entries, pieces
        self.encoded: list[str] = []  # names that wait for the decision whether the bucket is valid
        self.parts: list[Buffer] = []  # the encoded sums, by rank and tensor, without the empty ones
        self._sharder, self._postscale, self._meter = sharder, postscale, meter

    def __call__(self) -> list[None]:
        """Decode the sums into the targets of the entries. Call this only when the bucket is known to be valid."""
        begun_ns = now_ns()
        parts = iter(self.parts)
        for rank in range(len(self.pieces[0])):
            for name, entry, tensor in zip(self.names, self.entries, self.pieces):
                piece = tensor[rank]
                if not piece.count:
                    continue
                part = next(parts)
                if entry is not None and entry.target is not None:
                    target = _cut(entry.target, piece.begin, piece.count)
                    self.compressor.decode(_part_name(name, "sum"), part, target, self._postscale)
        self._sharder.settle(self.compressor, self.encoded, True)
        self._meter.unpack_ns += now_ns() - begun_ns
        self._meter.encoded += sum(part.nbytes for part in self.parts)
        return [None] * len(self.entries)

    def void(self) -> None:
        """Restore the compressor's state, because the bucket is void and its entries will be encoded again."""
        self._sharder.settle(self.compressor, self.encoded, False)


def _part_name(name: str, part: int | str) -> str:
    return f"{name}/{part}" if name else ""


def _pieces(count: int, size: int, dtype: DType, compressor: Compressor) -> list[_Piece]:
    bounds = [count * rank // size for rank in range(size + 1)]
    counts = [end - begin for begin, end in pairwise(bounds)]
    encoded = [compressor.encoded_count(dtype, piece) if piece else 0 for piece in counts]
    return [_Piece(begin, piece, nencoded) for begin, piece, nencoded in zip(bounds, counts, encoded)]


def _walk(pieces: Sequence[Sequence[_Piece]], whole: Buffer, ranks: Sequence[int]) -> Iterator[tuple[int, int, Buffer]]:
    """Yield a tuple (rank, index of the tensor, buffer of the encoded piece) for each non-empty piece in ``whole``.

    The tuples are in the order in which the pieces are in memory. ``pieces[i][rank]`` describes the piece of tensor i
    that ``rank`` adds.
    """
    order = [(rank, i, tensor[rank]) for rank in ranks for i, tensor in enumerate(pieces) if tensor[rank].count]
    begins = accumulate((piece.encoded for _, _, piece in order), initial=0)
    for (rank, i, piece), begin in zip(order, begins):
        yield rank, i, _cut(whole, begin, piece.encoded)


def _cut(whole: Buffer, begin: int, count: int) -> Buffer:
    return Buffer(whole.address + begin * whole.dtype.itemsize, count, whole.dtype, (count,), owner=whole.owner)
