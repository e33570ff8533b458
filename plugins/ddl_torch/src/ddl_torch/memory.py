"""Tells whether a tensor alone uses its memory, keeps that memory from being resized, and tells autograd of writes.

Autograd may give the gradients of two parameters the same storage, and may still read a gradient's storage while the
backward pass runs. For example, the gradients of the parameters of ``a.view(-1) + b.view(-1)`` share a storage. ddl may
write to a storage only if nothing else uses it. The reference count of the storage shows whether this is so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddlcore.api import Mapped, Waitable


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
    """Make ``resize_`` of ``tensor`` and of its storage raise an error from now on.

    Otherwise, ``resize_`` could free memory that an operation in flight uses. The operation keeps a reference to the
    storage. This reference is enough protection against ``set_`` and ``.data =``, which give the tensor another
    storage, but not against ``resize_``, which gives the same storage other memory. torch refuses to resize a storage
    after a call of ``tensor.numpy()``, so this function makes that call.
    """
    try:
        tensor.numpy()
    except TypeError:  # NumPy does not have bfloat16
        tensor.view(torch.int16).numpy()


def hold_memory(tensors: Sequence[torch.Tensor]) -> None:
    """Prevent host tensors from being resized, because an asynchronous operation writes to their memory.

    From now on, ``resize_`` of such a tensor raises RuntimeError (and, because of a bug in torch, leaves the tensor
    object with the new shape). This cannot be undone, so the tensor cannot be resized after the operation either.
    Memory of a device is not protected. Functions that wait for their result need no protection and do not call this
    function.
    """
    # The operation's reference to the storage protects against ``set_`` and ``.data =``, but ``resize_`` gives the same
    # storage other memory. Checking the address does not help: the tensor may be resized while the reduction runs.
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.resizable():
                torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def mark_written(tensors: Sequence[torch.Tensor]) -> None:
    """Increment the version counters of ``tensors``: ddl has written to them, and autograd has not noticed that.

    Then backward raises an error if it needs their old values.
    """
    torch.autograd.graph.increment_version(tensors)


def mark_written_by(handle: Waitable, tensors: Sequence[torch.Tensor]) -> Waitable:
    """Return a handle like ``handle``, and inform autograd that the operation of ``handle`` writes to ``tensors``.

    Autograd is informed now, and again when the wait for the new handle ends. Values of ``tensors`` that autograd has
    saved before the end of the wait may be overwritten, so backward raises an error if it needs them.
    """
    written = tuple(tensors)  # the caller may change its list
    mark_written(written)

    def over(result: Any) -> Any:
        mark_written(written)
        return result

    return Mapped(handle, over)
