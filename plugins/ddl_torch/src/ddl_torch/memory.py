"""Tells whether a tensor is the only user of its memory, and keeps that memory from being resized; knows no collective.

Autograd may give the gradients of two parameters the same storage, and may still read a gradient's storage while
backward goes on: the parameters of ``a.view(-1) + b.view(-1)`` share a storage, and so does ``pos.unsqueeze(0)`` with
the tensor that it was added to. The reference count of a storage tells whether it may be written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def _count_unknown(_storage: int) -> int:
    return -1


# Takes the address of a storage (``storage._cdata``). torch's CUDA graphs use this function too; no public one exists.
# If a release of torch lacks it, no storage counts as exclusive, which is slower but never wrong.
use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _count_unknown)


def _count_of_one() -> int:
    """Return the use count of a storage that only one tensor uses.

    The Python object by which the count is read is included in the count.
    """
    tensor = torch.empty(1)  # a variable, so that it lives while its storage is counted
    return max(use_count(tensor.untyped_storage()._cdata), 0)


ALONE = _count_of_one()


def is_alone(storage: torch.UntypedStorage) -> bool:
    """Return whether the caller's tensor is the only user of ``storage``.

    Several Python variables that refer to one tensor object count as one user.
    """
    return use_count(storage._cdata) == ALONE


def pin_size(tensor: torch.Tensor) -> None:
    """Make ``resize_`` of the tensor, or of its storage, raise an error from now on.

    ``resize_`` would free memory that an operation in flight uses. Holding the storage protects against ``set_`` and
    ``.data =``, which give the tensor another storage, but not against ``resize_``, which gives the storage other
    memory. torch refuses to resize a storage that NumPy has seen.
    """
    try:
        tensor.numpy()
    except TypeError:  # NumPy does not have bfloat16
        tensor.view(torch.int16).numpy()


def mark_written(tensors: list[torch.Tensor]) -> None:
    """Raise the version counters of tensors that ddl has written, because autograd did not see those writes."""
    torch.autograd.graph.increment_version(tensors)
