"""Replaces torch.cuda and the driver by objects that record every call in order; needs no GPU."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
from ddl_torch.streams import CudaStreams

from ddlcore.types import Device

__all__ = ["FakeCuda"]


class FakeStream:
    def __init__(self, cuda: FakeCuda, index: int, handle: int) -> None:
        self.cuda = cuda
        self.index = index
        self.cuda_stream = handle


class FakeCuda:
    """Two GPUs.

    CPU tensors that are passed to ``on`` count as being there. ``notes`` are tuples of a call and its arguments.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ddl_torch import streams

        self.notes: list[tuple[Any, ...]] = []
        self.current = {0: FakeStream(self, 0, 0), 1: FakeStream(self, 1, 0x70)}
        self.failing = 0  # the error code that a wait returns
        self.capturing = False  # whether the current stream's work becomes a graph
        self.made = 0
        self._places: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._contexts: list[int] = []
        handles = itertools.count(0xE1)
        cuda = self

        class Event:
            def __init__(self) -> None:
                cuda.made += 1
                self.cuda_event = 0

            def record(self, stream: FakeStream) -> None:
                self.cuda_event = self.cuda_event or next(handles)  # torch creates the event when it is first recorded
                cuda.notes.append(("record", self.cuda_event, stream.index, stream.cuda_stream))

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: self.current[index])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: self)
        for cached in (streams._driver, streams._context):
            cached.cache_clear()

    def streams(self) -> CudaStreams:
        """Return ddl's streams, for which the tensors passed to ``on`` are on a GPU."""
        cuda = self

        class Claiming(CudaStreams):
            def place(self, tensor: torch.Tensor) -> Device | None:
                index = cuda.index(tensor)
                if index is None:
                    return super().place(tensor)
                return self._places.setdefault(index, Device("cuda", index))

        return Claiming()

    def on(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Make this tensor count as being on GPU ``index`` from now on."""
        self._places[id(tensor)] = index
        self._kept.append(tensor)
        return tensor

    def index(self, tensor: torch.Tensor) -> int | None:
        return self._places.get(id(tensor))

    # --- the driver

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.notes.append(("retain", device.value))
        context._obj.value = 0xC0 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self._contexts.append(context.value - 0xC0)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self._contexts.pop()
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:
        self.notes.append(("wait", event.value, self._contexts[-1], stream.value or 0))
        return self.failing

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"invalid resource handle"
        return 0
