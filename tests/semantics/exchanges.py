"""The collectives that a generated program makes beside its training: what ranks give, and what they must get; knows no ddl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.semantics.program import Between

__all__ = ["array", "given", "received", "root_of", "splits_of", "verb_of"]

Array = np.ndarray[Any, Any]
ROWS = 5  # of what is reduced and scattered


def verb_of(between: Between) -> str:
    return between.kind.partition(",")[0]


def root_of(between: Between, members: Sequence[int]) -> int:
    return members[between.seed % len(members)]


def splits_of(between: Between, rank: int, members: Sequence[int]) -> list[int]:
    """How many rows ``rank`` sends to each member: other numbers in each step, often none."""
    return [(between.seed + rank + 2 * member) % 3 for member in members]


def given(between: Between, rank: int, members: Sequence[int], number: int = 0) -> torch.Tensor:
    """What ``rank`` gives; ``number`` tells the tensors of a grouped call apart."""
    verb = verb_of(between)
    if verb.endswith("allgather"):
        rows = (between.seed + 2 * rank + number) % 4
    elif verb == "alltoall":
        rows = sum(splits_of(between, rank, members))
    else:
        rows = ROWS
    values = torch.arange(2 * rows, dtype=torch.float64 if number else torch.int64).reshape(rows, 2)
    values = values + 100 * rank + 7 * between.seed
    if number or between.element == "int64":
        return values
    if between.element.startswith("complex"):
        values = values + 1j * (values + 3)
    elif between.element.startswith("float8"):
        values = values % 16  # larger integers would be rounded
    return values.to(getattr(torch, between.element))


def array(tensor: torch.Tensor) -> Array:
    """Return the values of ``tensor``. Types that NumPy lacks, or cannot subtract, become signed integers of their bits."""
    bits = {torch.uint32: torch.int32, torch.uint64: torch.int64, torch.float8_e4m3fn: torch.int8}.get(tensor.dtype)
    return tensor.numpy() if bits is None else tensor.view(bits).numpy().astype(np.int64)


def received(between: Between, rank: int, members: Sequence[int]) -> tuple[Array, ...]:
    """What ``rank`` must get, one array after the other."""
    verb, me = verb_of(between), members.index(rank)
    if verb == "barrier":
        return ()
    if verb == "object":
        return (np.array([between.seed, root_of(between, members)]),)
    if verb == "objects":
        return (np.array([between.seed + member for member in members]),)
    if verb.startswith("broadcast"):
        return (array(given(between, root_of(between, members), members)),)
    if verb == "alltoall":
        counts = [splits_of(between, member, members) for member in members]
        parts = [given(between, member, members).split(row)[me] for member, row in zip(members, counts)]
        return np.concatenate([array(part) for part in parts]), np.array([row[me] for row in counts])
    results = []
    for number in range(2 if verb.startswith("grouped") else 1):
        tensors = [given(between, member, members, number) for member in members]
        if verb.endswith("allgather"):
            results.append(np.concatenate([array(tensor) for tensor in tensors]))
        else:
            rows = [ROWS // len(members) + (place < ROWS % len(members)) for place in range(len(members))]
            results.append(torch.stack(tensors).sum(0).split(rows)[me].numpy())
    return tuple(results)
