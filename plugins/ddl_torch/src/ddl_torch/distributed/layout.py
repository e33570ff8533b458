"""Finds the memory in which tensors of torch's calls can be used as they are, and copies where they cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor with a row for each of ``tensors``, in their own memory; None if they do not follow each other.

    The tensors have one shape. ``chunk`` and ``unbind`` of a tensor make such lists.
    """
    first = tensors[0]
    if not all(one.is_contiguous() and one.shape == first.shape and one.dtype == first.dtype for one in tensors):
        return None
    storage, nbytes = first.untyped_storage(), first.numel() * first.element_size()
    at = storage.data_ptr()
    for i, one in enumerate(tensors):
        if one.untyped_storage().data_ptr() != at or one.data_ptr() != first.data_ptr() + i * nbytes:
            return None
    strides = (max(first.numel(), 1), *first.stride())
    return first.detach().as_strided((len(tensors), *first.shape), strides)


def spread(outputs: Sequence[torch.Tensor]) -> Callable[[Any], None]:
    """Return a function that copies the rows of a result to ``outputs``."""

    def land(result: Any) -> None:
        with torch.no_grad():
            for output, row in zip(outputs, result.unbind(0)):
                output.copy_(row.view(output.shape))

    return land


def lands_in(output: torch.Tensor) -> Callable[[Any], None]:
    """Return a function that copies a result to ``output``, which may have any layout."""

    def land(result: Any) -> None:
        with torch.no_grad():
            output.copy_(result.view(output.shape))

    return land
