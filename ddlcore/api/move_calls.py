"""Describes the collectives that move data without reducing it: allgathers, broadcasts and alltoalls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddlcore.api.objects import check_root
from ddlcore.api.verb_call import VerbCall, checked_targets, row_target
from ddlcore.errors import InvalidArgument
from ddlcore.messages.spec import Spec
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.outcome import Outcome
from ddlcore.types import Buffer, Kind

__all__ = [
    "allgather",
    "allgather_spec",
    "alltoall",
    "alltoall_spec",
    "broadcast",
    "broadcast_spec",
    "one_for_each",
    "splits_of",
]


def allgather(
    call: VerbCall,
    tensors: Sequence[Any],
    named_as: Kind,
    sparse: bool,
    outputs: Sequence[Any] | None = None,
    part_of: str = "",
) -> Handle:
    """Start an allgather of each of ``tensors``; see ``Operations.grouped_allgather_async``.

    ``named_as``: the kind in the tensors' names in messages. ``part_of``: see Spec.
    """
    given = one_for_each(outputs, tensors)
    sources = call.sources_with_rows(tensors, "allgather")
    device = call.device(sources, "allgather", sparse)
    names = call.names(named_as, len(tensors))
    group = 0 if call.single else len(tensors)
    rows = [(source.shape[0],) for source in sources]
    targets = [
        row_target(call.adapter, output, source, source.shape[0] * len(call.ranks), "allgather")
        for output, source in zip(given, sources)
    ]
    specs = [
        allgather_spec(source, device, group, equal, part_of)
        for source, equal in zip(sources, [None] * len(rows) if outputs is None else rows)
    ]

    def finish(outcomes: Sequence[Outcome | None]) -> Any:
        gathered = [
            call.adopt(outcome, sum(r[0] for r in outcome.rows), source, tensor) if output is None else output
            for outcome, source, tensor, output in zip(outcomes, sources, tensors, given)
            if outcome is not None
        ]
        return gathered[0] if call.single else gathered

    return call.submit(names, specs, sources, targets, finish, [*tensors, *given], rows)


def allgather_spec(source: Buffer, device: str, group: int, rows: tuple[int, ...] | None, part_of: str = "") -> Spec:
    """Return the description of an allgather of the tensor in ``source``.

    ``group``: the number of tensors of a grouped call, or 0. ``rows``: those of every rank, if they are equal.
    """
    how: Any = {"device": device, "group": group, "element": source.element, "rows": rows, "part_of": part_of}
    return Spec(Kind.ALLGATHER, source.dtype, source.shape[1:], **how)


def one_for_each(outputs: Sequence[Any] | None, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return ``outputs``, or as many None as there are ``tensors`` if ``outputs`` is None.

    Raises InvalidArgument if there are more or fewer outputs than tensors.
    """
    if outputs is None:
        return [None] * len(tensors)
    if len(outputs) != len(tensors) or any(output is None for output in outputs):
        raise InvalidArgument(f"{len(outputs)} outputs are given for {len(tensors)} tensors; give one for each")
    return outputs


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


def alltoall(
    call: VerbCall, tensor: Any, splits: Sequence[int] | None, output: Any = None, part_of: str = ""
) -> Handle:
    """Start an alltoall of ``tensor``; see ``Operations.alltoall_async``. ``part_of``: see Spec."""
    sources = call.sources_with_rows([tensor], "alltoall")
    (source,) = sources
    sent = splits_of(splits, source.shape[0], len(call.ranks))
    device = call.device(sources, "alltoall")
    names = call.names(Kind.ALLTOALL, 1)
    equal = sent if output is not None and splits is None else None
    target = row_target(call.adapter, output, source, None if equal is None else source.shape[0], "alltoall")
    spec = alltoall_spec(source, device, equal, part_of)
    me = call.ranks.index(call.job.rank)

    def finish(outcomes: Sequence[Outcome | None]) -> Any:
        (outcome,) = outcomes
        assert outcome is not None
        received = [rows[me] for rows in outcome.rows]
        result = call.adopt(outcome, sum(received), source, tensor) if output is None else output
        return result, received

    return call.submit(names, [spec], sources, [target], finish, [tensor, output], [sent])


def alltoall_spec(source: Buffer, device: str, rows: tuple[int, ...] | None, part_of: str = "") -> Spec:
    """Return the description of an alltoall of the tensor in ``source``. ``rows``: see ``allgather_spec``."""
    how: Any = {"device": device, "element": source.element, "rows": rows, "part_of": part_of}
    return Spec(Kind.ALLTOALL, source.dtype, source.shape[1:], **how)


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
