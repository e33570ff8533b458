"""Describes torch tensors as memory, and makes torch tensors from memory.

Runs no collective and computes no gradient.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]  # of this thread; there is no public name
from torch.profiler import record_function

from ddl_torch.streams import CudaStreams, Streams
from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.transport import Memory
from ddlcore.errors import InvalidArgument
from ddlcore.types import CPU, Buffer, Device, DType, carrier_of, known_types

_TORCH: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.label) for dtype in DType}
_DTYPES = {native: dtype for dtype, native in _TORCH.items()}


@contextmanager
def _range(name: str, nvtx: bool) -> Iterator[None]:
    """Return a context manager; what runs inside it appears in torch's profiler as a range called ``name``.

    If ``nvtx`` is true, the range also appears in NVIDIA's tools.
    """
    # The name is an argument because ``range`` formats its first parameter, and tensor names may contain braces.
    with torch.cuda.nvtx.range("{}", name) if nvtx else nullcontext(), record_function(name):
        yield


class TorchAdapter(Adapter):
    """The adapter for torch tensors in process memory and on NVIDIA GPUs.

    If a tensor requires a gradient, only its values are used.
    """

    name = "torch"

    def __init__(self) -> None:
        self.streams: Streams = CudaStreams()

    def range(self, name: str) -> AbstractContextManager[object] | None:
        nvtx = torch.cuda.is_initialized()  # there is no way to find out whether such a tool is listening
        return _range(name, nvtx) if nvtx or _profiler_enabled() else None

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                f"a torch tensor is needed, not {type(tensor).__name__}; make one: torch.as_tensor(...)"
            )
        dtype = _DTYPES.get(tensor.dtype)
        place = self.streams.place(tensor)
        if dtype is None or place is None or tensor.layout is not torch.strided or tensor.is_neg():
            carried = _as_carrier(tensor)
            if carried is None:
                raise InvalidArgument(_objection(tensor, place))
            return replace(self.buffer(carried, elementwise=elementwise), element=_label(tensor))
        strides = None
        if not tensor.is_contiguous():
            strides = dense_strides(tensor)
            if strides is None or not elementwise:
                raise InvalidArgument(
                    f"Tensor is required to be contiguous: shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
                    "pass tensor.contiguous()"
                )
        address = tensor.data_ptr()
        if not address and tensor.numel():
            raise InvalidArgument(
                f"{type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its own: it wraps other "
                "tensors, or its memory was freed. Pass the tensor inside, of a DTensor tensor.to_local()"
            )
        # Hold the storage, not the tensor: ``set_`` and ``tensor.data = ...`` may give the tensor another storage.
        owner, mark = (tensor.untyped_storage(), None) if place is CPU else self.streams.hold(place, tensor)
        buffer = Buffer(address, tensor.numel(), dtype, tuple(tensor.shape), strides, place, owner)
        if mark is not None:
            mark.set(buffer)
        return buffer

    def address(self, tensor: Any, like: Buffer) -> int | None:
        # Reading an attribute costs time, up to microseconds after a pause. So the device is not read if the address
        # is the same as last time, because then the memory is on the same device.
        if like.device is not CPU:
            return None  # ``buffer`` must also record when the tensor is ready
        if isinstance(tensor, torch.Tensor) and like.strides is None and tensor.layout is torch.strided:
            address = tensor.data_ptr()
            if (
                (address == like.address or (address and tensor.is_cpu))
                and tensor.shape == like.shape
                and not like.element
                and _DTYPES.get(tensor.dtype) is like.dtype
                and tensor.is_contiguous()
                and not tensor.is_neg()
            ):
                return address
        return super().address(tensor, like)

    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Any:
        if shape is None:
            return torch.empty_like(like, requires_grad=False)  # keeps any dense layout
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)

    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        count = 1
        for extent in shape:
            count *= extent
        if count == 0:  # frombuffer refuses an empty buffer
            return torch.empty(tuple(shape), dtype=_TORCH[dtype], device=like.device)
        if not like.is_cpu:
            whole = torch.as_tensor(_OnDevice(memory, count * dtype.itemsize), device=like.device)
            return whole.view(_TORCH[dtype]).view(tuple(shape))
        held: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(memory.address)
        held.memory = memory  # the tensor keeps ``held`` alive, and ``held`` keeps the memory alive
        return torch.frombuffer(held, dtype=_TORCH[dtype]).view(tuple(shape))

    def restore(self, tensor: Any, like: Any) -> Any:
        return torch.view_as_complex(tensor) if like.is_complex() else tensor.view(like.dtype)

    def copy(self, source: Any, target: Any) -> None:
        target.detach().copy_(source.detach())

    def after(self, event: int, tensors: Sequence[Any]) -> None:
        self.streams.after(event, tensors)


class _OnDevice:
    """A block of GPU memory that offers the CUDA array interface, which CUDA libraries use to exchange memory."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory = memory  # torch keeps this object alive, and this object keeps the memory alive
        data = (memory.address, False)  # not read-only
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": data, "version": 2}


def _label(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_carrier(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of ``tensor`` as a tensor of the type that carries its elements.

    Returns None if no other type carries them, or if the memory has other values than the tensor.
    """
    carrier = carrier_of(_label(tensor))
    if carrier is None or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        return None
    values = tensor.detach()
    return torch.view_as_real(values) if carrier.is_complex else values.view(_TORCH[carrier.dtype])


def _objection(tensor: torch.Tensor, place: Device | None) -> str:
    """Return a message for the user: why no transport can send ``tensor``, and how to make a tensor that can be sent.

    ``place`` is the tensor's device, or None if ddl does not know the device.
    """
    what = f"a tensor of shape {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided:
        return f"{what} is sparse ({tensor.layout}); use sparse_allreduce_async, or pass tensor.to_dense()"
    if tensor.dtype not in _DTYPES and carrier_of(_label(tensor)) is None:
        way = "tensor.dequantize()" if tensor.is_quantized else "tensor.to(...) one of them"
        return f"Tensor type {tensor.dtype} is not supported; ddl carries {known_types()}: pass {way}"
    if place is None:
        return f"{what} lies on {tensor.device}, which no installed transport reaches; pass tensor.cpu()"
    if tensor.is_conj():
        return f"{what} is the conjugated view of another; pass tensor.resolve_conj()"
    return f"{what} is the negated view of another; pass tensor.resolve_neg()"


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides, in elements, of a tensor that fills its memory without gaps in some order of its axes.

    Returns None for any other tensor. The stride of an axis with one element has no meaning, so the returned stride of
    such an axis is 1. Therefore equal layouts have equal strides.
    """
    shape, actual = tensor.shape, tensor.stride()
    strides = [1] * len(shape)
    expected = 1
    for axis in sorted(range(len(shape)), key=actual.__getitem__):
        if shape[axis] == 1:
            continue
        if actual[axis] != expected:
            return None
        strides[axis] = expected
        expected *= shape[axis]
    return tuple(strides)
