"""Describes the collectives that move data without reducing it: allgathers, broadcasts and alltoalls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddlcore.api.objects import check_root
from ddlcore.api.verb_call import VerbCall, checked_targets
from ddlcore.errors import InvalidArgument
from ddlcore.messages.spec import Spec
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.outcome import Outcome
from ddlcore.types import Buffer, Kind

__all__ = ["allgather", "alltoall", "broadcast", "broadcast_spec", "splits_of"]


def allgather(call: VerbCall, tensors: Sequence[Any], named_as: Kind, sparse: bool) -> Handle:
    """Start an allgather of each of ``tensors``; see ``Operations.grouped_allgather_async``.

    ``named_as``: the kind in the tensors' names in messages.
    """
    sources = call.sources_with_rows(tensors, "allgather")
    device = call.device(sources, "allgather", sparse)
    names = call.names(named_as, len(tensors))
    group = 0 if call.single else len(tensors)
    specs = [
        Spec(Kind.ALLGATHER, source.dtype, source.shape[1:], device=device, group=group, element=source.element)
        for source in sources
    ]

    def finish(outcomes: Sequence[Outcome | None]) -> Any:
        gathered = [
            call.adopt(outcome, sum(r[0] for r in outcome.rows), source, tensor)
            for outcome, source, tensor in zip(outcomes, sources, tensors)
            if outcome is not None
        ]
        return gathered[0] if call.single else gathered

    rows = [(source.shape[0],) for source in sources]
    return call.submit(names, specs, sources, [None] * len(specs), finish, tensors, rows)


def broadcast(call: VerbCall, tensor: Any, root_rank: int, output: Any) -> Handle:
    """Start a broadcast of the tensor of ``root_rank``; see ``Operations.broadcast_async``."""
    check_root(root_rank, call.ranks, call.set_id)
    source = call.adapter.buffer(tensor, elementwise=True)
    if output is None:
        output = call.adapter.allocate(tensor)
    targets = checked_targets(call.adapter, [output], [source], [tensor])
    device = call.device([source], "broadcast")
    names = call.names(Kind.BROADCAST, 1)
    spec = broadcast_spec(source, root_rank, device)
    return call.submit(names, [spec], [source], targets, lambda _: output, [tensor, output])


def broadcast_spec(source: Buffer, root_rank: int, device: str) -> Spec:
    """Return the description of a broadcast of the tensor in ``source``. ``device``: see ``VerbCall.device``."""
    how: Any = {"device": device, "strides": source.strides, "element": source.element}
    return Spec(Kind.BROADCAST, source.dtype, source.shape, root=root_rank, **how)


def alltoall(call: VerbCall, tensor: Any, splits: Sequence[int] | None) -> Handle:
    """Start an alltoall of ``tensor``; see ``Operations.alltoall_async``."""
    sources = call.sources_with_rows([tensor], "alltoall")
    (source,) = sources
    sent = splits_of(splits, source.shape[0], len(call.ranks))
    device = call.device(sources, "alltoall")
    names = call.names(Kind.ALLTOALL, 1)
    spec = Spec(Kind.ALLTOALL, source.dtype, source.shape[1:], device=device, element=source.element)
    me = call.ranks.index(call.job.rank)

    def finish(outcomes: Sequence[Outcome | None]) -> Any:
        (outcome,) = outcomes
        assert outcome is not None
        received = [rows[me] for rows in outcome.rows]
        return call.adopt(outcome, sum(received), source, tensor), received

    return call.submit(names, [spec], sources, [None], finish, [tensor], [sent])


def splits_of(splits: Sequence[int] | None, rows: int, size: int) -> tuple[int, ...]:
    """Return how many of ``rows`` rows are sent to each of ``size`` ranks; equally many if ``splits`` is None.

    Raises InvalidArgument if that is impossible, or if ``splits`` does not fit.
    """
    if splits is None:
        if rows % size:
            raise InvalidArgument(
                f"alltoall: the first dimension ({rows}) is not divisible by the {size} ranks; give splits"
            )
        return (rows // size,) * size
    sent = tuple(int(split) for split in splits)
    if len(sent) != size:
        raise InvalidArgument(f"alltoall: splits has {len(sent)} entries for {size} ranks; give one for each")
    if any(split < 0 for split in sent) or sum(sent) != rows:
        raise InvalidArgument(f"alltoall: splits {list(sent)} do not add up to the first dimension ({rows})")
    return sent
