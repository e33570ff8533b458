"""Tells whether a tensor is the only user of its memory, and prevents that memory from being resized.

Runs no collective. Autograd may give the gradients of two parameters the same storage, and may still read a gradient's
storage while the backward pass runs. For example, the gradients of the parameters of ``a.view(-1) + b.view(-1)`` share
a storage, and so does the gradient of ``pos.unsqueeze(0)`` with that of the tensor that it was added to. ddl may write
to a storage only if nothing else uses it; the reference count of the storage tells this.
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
    """Return the use count that a storage has if only one tensor uses the storage.

    Reading the count needs a Python object for the storage, and the count includes this object.
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
    """Make ``resize_`` of ``tensor`` raise an error from now on, and also ``resize_`` of its storage.

    ``resize_`` would free memory that an operation in flight uses. The operation keeps a reference to the storage. That
    reference protects against ``set_`` and ``.data =``, which give the tensor another storage. That reference does not
    protect against ``resize_``, which gives the same storage other memory. But torch refuses to resize a storage after
    ``tensor.numpy()`` was called, so this function calls ``tensor.numpy()``.
    """
    try:
        tensor.numpy()
    except TypeError:  # NumPy does not have bfloat16
        tensor.view(torch.int16).numpy()


def mark_written(tensors: list[torch.Tensor]) -> None:
    """Raise the version counters of ``tensors``: ddl has written to them, and autograd has not noticed that."""
    torch.autograd.graph.increment_version(tensors)
