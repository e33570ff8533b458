"""Tells whether anything but a tensor sees its memory, and keeps that memory where it is; knows no collective.

Autograd may give the gradients of two parameters one storage, and may still read a gradient's storage while
backward goes on: the parameters of ``a.view(-1) + b.view(-1)`` share one, and so does ``pos.unsqueeze(0)`` with the
tensor that it was added to. A storage counts those who hold it, so one look tells whether it may be written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["is_alone", "mark_written", "pin_size", "use_count"]


def _count_unknown(_storage: int) -> int:
    return -1


# By the address of a storage (``storage._cdata``). torch's CUDA graphs use it as well; there is no public form.
# Where a release of torch lacks it, no storage counts as exclusive: that is slower, and never wrong.
use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _count_unknown)


def _count_of_one() -> int:
    """How often a storage is held that one tensor alone sees: by that tensor, and by the Python object that asks."""
    tensor = torch.empty(1)  # has a name, and so lives while it is counted
    return max(use_count(tensor.untyped_storage()._cdata), 0)


ALONE = _count_of_one()


def is_alone(storage: torch.UntypedStorage) -> bool:
    """Return whether one tensor, of which the caller knows, is all that sees ``storage``.

    Two Python names of one tensor are one tensor here: who writes it by either name means it.
    """
    return use_count(storage._cdata) == ALONE


def pin_size(tensor: torch.Tensor) -> None:
    """Make ``resize_`` of the tensor, or of its storage, raise from now on: it would free memory that is in flight.

    Whoever holds the storage is safe from ``set_`` and from ``.data =``, which give the tensor another one, but not
    from ``resize_``, which gives the storage other memory. torch refuses that where NumPy has seen the storage.
    """
    try:
        tensor.numpy()
    except TypeError:  # NumPy does not have bfloat16
        tensor.view(torch.int16).numpy()


def mark_written(tensors: list[torch.Tensor]) -> None:
    """Raise the version counters of tensors that were written behind autograd's back, so that it notices."""
    torch.autograd.graph.increment_version(tensors)
