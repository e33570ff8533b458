"""Random calls of torch.distributed: how a rank makes one, and what it must get."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16, torch.complex64)
SHAPES = ((), (1,), (7,), (3, 2), (0, 4), (2, 1, 3))
KINDS = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_chunks",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_uneven",
    "barrier",
)
# torch 2.10 has these functions under older names. Later releases warn of the older names.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
REDUCES = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single")


@dataclass(frozen=True)
class GroupCall:
    """One collective. ``seed`` determines the values that each rank gives."""

    kind: str
    members: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    op: str = "SUM"
    root: int = 0  # a rank of the group
    gaps: bool = False  # the tensors are not contiguous
    seed: int = 0


def make(chance: random.Random, groups: Sequence[tuple[int, ...]], like: GroupCall | None = None) -> GroupCall:
    """Return a random call in one of ``groups``. If ``like`` is given, return that call with other values."""
    if like is not None:
        return GroupCall(**{**vars(like), "seed": chance.randrange(1000)})
    members = chance.choice(list(groups))
    kind, dtype = chance.choice(KINDS), chance.choice(DTYPES)
    op = chance.choice(OPS) if kind in REDUCES else "SUM"
    if dtype.is_complex:
        op = chance.choice(("SUM", "AVG"))
    elif dtype.is_floating_point:
        op = op if not op.startswith("B") else "MAX"
    elif op == "AVG":
        op = "MIN"  # an average of integers is not defined by torch
    root = chance.randrange(len(members))
    return GroupCall(
        kind, members, dtype, chance.choice(SHAPES), op, root, chance.random() < 0.2, chance.randrange(1000)
    )


def _values(call: GroupCall, rank: int, shape: Sequence[int], part: int = 0) -> torch.Tensor:
    """Return the values that ``rank`` of the group gives; small, so that sums and products are exact in every type."""
    count = 1
    for extent in shape:
        count *= extent
    numbers = (torch.arange(count) * 7 + 3 * rank + 5 * part + call.seed) % 3 + 1
    values = numbers.reshape(tuple(shape)).to(call.dtype)
    return values * (1 + 1j) if call.dtype.is_complex else values


def _laid(call: GroupCall, values: torch.Tensor) -> torch.Tensor:
    """Return ``values``, with gaps between the elements if the call has them."""
    if not call.gaps or values.dim() == 0:
        return values.clone()
    wide = values.new_zeros((*values.shape[:-1], 2 * values.shape[-1]))
    view = wide[..., ::2]
    view.copy_(values)
    return view


def _reduced(call: GroupCall, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    operations: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    whole = functools.reduce(operations[call.op], tensors)
    return (whole / len(tensors)).to(call.dtype) if call.op == "AVG" else whole


def _uneven(call: GroupCall, giver: int, to: int) -> int:
    return (call.seed + giver + 2 * to) % 3


def start(call: GroupCall, group: Any, me: int, async_op: bool) -> tuple[Any, Callable[[], list[torch.Tensor]]]:
    """Make the call on ``me``, a rank of the group. Return the work, and a function that returns the results after it."""
    size = len(call.members)
    how: Any = {"group": group, "async_op": async_op}
    op, root = getattr(dist.ReduceOp, call.op), call.members[call.root]
    own = _laid(call, _values(call, me, call.shape))
    kind = call.kind

    def blank(*extents: int) -> torch.Tensor:
        return _laid(call, torch.zeros(extents, dtype=call.dtype))

    if kind == "barrier":
        return dist.barrier(**how), list
    if kind == "all_reduce":
        return dist.all_reduce(own, op, **how), lambda: [own]
    if kind == "all_reduce_coalesced":
        both = [own, _laid(call, _values(call, me, (4,), 1))]
        return dist.all_reduce_coalesced(both, op, **how), lambda: both
    if kind == "broadcast":
        return dist.broadcast(own, root, **how), lambda: [own]
    if kind == "reduce":
        return dist.reduce(own, root, op, **how), lambda: [own]
    if kind == "all_gather":
        parts = [blank(*call.shape) for _ in range(size)]
        return dist.all_gather(parts, own, **how), lambda: parts
    if kind == "all_gather_chunks":
        parts = list(torch.zeros((size, *call.shape), dtype=call.dtype).unbind(0))
        return dist.all_gather(parts, own, **how), lambda: parts
    if kind == "all_gather_single":
        flat = own.reshape(-1) if own.dim() == 0 else own
        whole = blank(size * flat.shape[0], *flat.shape[1:])
        return _all_gather_single(whole, flat, **how), lambda: [whole]
    if kind == "gather":
        parts = [blank(*call.shape) for _ in range(size)] if me == call.root else []
        return dist.gather(own, parts or None, root, **how), lambda: parts
    if kind == "scatter":
        given = [_laid(call, _values(call, me, call.shape, to)) for to in range(size)] if me == call.root else None
        got = blank(*call.shape)
        return dist.scatter(got, given, root, **how), lambda: [got]
    if kind == "reduce_scatter":
        got = blank(*call.shape)
        given = [_laid(call, _values(call, me, call.shape, to)) for to in range(size)]
        return dist.reduce_scatter(got, given, op, **how), lambda: [got]
    if kind == "reduce_scatter_single":
        got = blank(2, *call.shape)
        whole = _laid(call, torch.cat([_values(call, me, (2, *call.shape), to) for to in range(size)]))
        return _reduce_scatter_single(got, whole, op, **how), lambda: [got]
    if kind == "all_to_all":
        given = [_laid(call, _values(call, me, (to + 1, 2), to)) for to in range(size)]
        parts = [blank(me + 1, 2) for _ in range(size)]
        return dist.all_to_all(parts, given, **how), lambda: parts
    if kind == "all_to_all_single":
        whole = _laid(call, torch.cat([_values(call, me, (1, *call.shape), to) for to in range(size)]))
        got = blank(size, *call.shape)
        return dist.all_to_all_single(got, whole, **how), lambda: [got]
    sent = [_uneven(call, me, to) for to in range(size)]
    received = [_uneven(call, giver, me) for giver in range(size)]
    whole = _laid(call, torch.cat([_values(call, me, (n, *call.shape), to) for to, n in enumerate(sent)]))
    got = blank(sum(received), *call.shape)
    return dist.all_to_all_single(got, whole, received, sent, **how), lambda: [got]


def expected(call: GroupCall, me: int) -> list[torch.Tensor]:
    """Return what ``me``, a rank of the group, must get."""
    size, kind = len(call.members), call.kind
    ranks = range(size)
    each = [_values(call, rank, call.shape) for rank in ranks]
    if kind == "barrier":
        return []
    if kind == "all_reduce":
        return [_reduced(call, each)]
    if kind == "all_reduce_coalesced":
        return [_reduced(call, each), _reduced(call, [_values(call, rank, (4,), 1) for rank in ranks])]
    if kind == "broadcast":
        return [each[call.root]]
    if kind == "reduce":
        return [_reduced(call, each) if me == call.root else each[me]]
    if kind in ("all_gather", "all_gather_chunks"):
        return each
    if kind == "all_gather_single":
        return [torch.cat([one.reshape(-1) if one.dim() == 0 else one for one in each])]
    if kind == "gather":
        return each if me == call.root else []
    if kind == "scatter":
        return [_values(call, call.root, call.shape, me)]
    if kind == "reduce_scatter":
        return [_reduced(call, [_values(call, rank, call.shape, me) for rank in ranks])]
    if kind == "reduce_scatter_single":
        return [_reduced(call, [_values(call, rank, (2, *call.shape), me) for rank in ranks])]
    if kind == "all_to_all":
        return [_values(call, giver, (me + 1, 2), me) for giver in ranks]
    if kind == "all_to_all_single":
        return [torch.cat([_values(call, giver, (1, *call.shape), me) for giver in ranks])]
    return [torch.cat([_values(call, giver, (_uneven(call, giver, me), *call.shape), me) for giver in ranks])]
