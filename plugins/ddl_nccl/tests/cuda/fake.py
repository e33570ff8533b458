"""A simulated CUDA driver for tests. It uses host memory, a thread for each stream, and numba's simulator for kernels.

A stream runs its calls later than the thread that has queued them. A test can hold streams back.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from ddl_nccl.cuda.driver import Driver, Facts, failure
from ddl_nccl.cuda.names import Name, catalogue
from ddl_nccl.cuda.simulate import launch

__all__ = ["FakeDriver", "fake_code"]

GARBAGE = 0xA5
NAMES = {str(name): name for name in catalogue()}


def fake_code(name: Name, capability: tuple[int, int]) -> bytes:
    """Return fake code for a kernel, in place of a compiler."""
    return str(name).encode()


def settled(condition: Callable[[], bool]) -> bool:
    """Collect garbage until ``condition()`` is true, at most 20 s. Return whether it is true.

    One call of ``gc.collect`` is not enough: it does nothing while another thread collects.
    """
    deadline_s = time.monotonic() + 20.0
    while not condition() and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.01)
    return condition()


class _Stream:
    def __init__(self) -> None:
        self.calls: deque[Callable[[], object]] = deque()
        self.changed = threading.Condition()
        self.held = 0
        self.closed = False
        self.ended = False  # whether the thread will look for no more calls
        self.thread = threading.Thread(target=self._loop, name="fake-stream", daemon=True)
        self.thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Queue ``call``, or make the call now if the thread of this stream has ended.

        The thread may have ended because one rank closes its stream while another rank synchronizes with all streams.
        """
        with self.changed:
            if not self.ended:
                self.calls.append(call)
                self.changed.notify()
                return
        call()

    def _loop(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: not self.held and (self.calls or self.closed))
                if not self.calls:
                    self.ended = True
                    return
                call = self.calls.popleft()
            call()


def _when_all(before: Sequence[threading.Event], moment: threading.Event) -> None:
    if all(reached.wait(120.0) for reached in before):
        moment.set()


class FakeDriver(Driver):
    """A simulated driver whose calls can fail.

    ``fail`` maps the name of a call to the CUresult that its next call returns. ``asked`` has the number of calls by
    name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.handles = itertools.count(100)
        self.streams: dict[int, _Stream] = {}
        self.moments: dict[int, threading.Event] = {}
        self.blocks: dict[int, Any] = {}
        self.pinned_blocks: dict[int, Any] = {}
        self.graveyard: list[Any] = []  # freed blocks, kept so that the memory is not reused and a late use is noticed
        self.fail: dict[str, int] = {}
        self.asked: dict[str, int] = {}

    def _note(self, call: str) -> None:
        self.asked[call] = self.asked.get(call, 0) + 1
        if call in self.fail:
            raise failure(call, self.fail.pop(call))

    @contextmanager
    def held(self, *only: int) -> Iterator[None]:
        """Return a context manager inside which streams begin no calls: those in ``only``, or else all streams."""
        held = [self.streams[handle] for handle in only or self.streams]
        for stream in held:
            stream.held += 1
        try:
            yield
        finally:
            for stream in held:
                with stream.changed:
                    stream.held -= 1
                    stream.changed.notify()

    def stop(self) -> None:
        """End the threads of the streams."""
        for handle in list(self.streams):
            self.destroy_stream(handle)

    # --- what the device contract asks

    def count(self) -> int:
        return 2

    def open(self, index: int) -> Facts:
        self._note("open")
        if index >= self.count():
            raise failure(f"opening cuda:{index}", 101)
        return Facts("fake", f"fake-{index}", (9, 0), 4, (13, 0))

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 2 << 30

    def current(self) -> Any:
        return nullcontext()

    def create_stream(self) -> int:
        handle = next(self.handles)
        self.streams[handle] = _Stream()
        return handle

    def destroy_stream(self, stream: int) -> None:
        gone = self.streams.pop(stream)
        with gone.changed:
            gone.closed = True
            gone.changed.notify()
        gone.thread.join(20.0)

    def create_event(self) -> int:
        self._note("create_event")
        return next(self.handles)

    def destroy_event(self, event: int) -> None:
        self.moments.pop(event, None)

    def record(self, event: int, stream: int) -> None:
        self.moments[event] = moment = threading.Event()
        self.streams[stream].put(moment.set)

    def record_all(self, event: int, stream: int) -> None:
        """Record an event behind all streams, including those that a test made itself to act as the user's."""
        self.moments[event] = moment = threading.Event()
        streams = list(self.streams.values())  # another thread may open or close one meanwhile
        before = [threading.Event() for _ in streams]
        for one, reached in zip(streams, before):
            one.put(reached.set)
        threading.Thread(target=_when_all, args=(before, moment), daemon=True).start()

    def synchronise(self) -> None:
        self._note("synchronise")
        streams = list(self.streams.values())  # another thread may open or close one meanwhile
        before = [threading.Event() for _ in streams]
        for one, reached in zip(streams, before):
            one.put(reached.set)
        assert all(reached.wait(120.0) for reached in before)

    def wait_for(self, stream: int, event: int) -> None:
        self.streams[stream].put(partial(self.moments[event].wait, 30.0))

    def done(self, event: int) -> bool:
        self._note("done")
        return self.moments[event].is_set()

    def allocate(self, nbytes: int, stream: int) -> int:
        self._note("allocate")
        block = (ctypes.c_char * nbytes)()
        address = ctypes.addressof(block)
        ctypes.memset(address, GARBAGE, nbytes)
        self.blocks[address] = block
        return address

    def free(self, address: int, stream: int) -> None:
        def run() -> None:
            block = self.blocks.pop(address)
            ctypes.memset(address, GARBAGE, len(block))
            self.graveyard.append(block)

        if stream:
            self.streams[stream].put(run)
        else:
            run()

    def pin(self, nbytes: int) -> int:
        self._note("pin")
        block = (ctypes.c_char * nbytes)()
        self.pinned_blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def unpin(self, address: int) -> None:
        del self.pinned_blocks[address]

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._note("copy")
        self.streams[stream].put(partial(ctypes.memmove, target, source, nbytes))

    def copy_many(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        self._note("copy_many")
        for target, source, nbytes in zip(targets, sources, sizes):
            self.streams[stream].put(partial(ctypes.memmove, target, source, nbytes))

    def load(self, image: bytes, entry: str) -> Any:
        self._note("load")
        assert image.decode() == entry
        return NAMES[entry]

    def launch(self, function: Any, blocks: int, threads: int, stream: int, parameters: int) -> None:
        self._note("launch")
        arguments: list[int | float] = []
        for i, kind in enumerate(function.arguments):
            place = ctypes.c_void_p.from_address(parameters + 8 * i).value or 0
            (value,) = struct.unpack("=d" if kind == "d" else "=q", ctypes.string_at(place, 8))
            arguments.append(value)
        self.streams[stream].put(partial(launch, function, blocks, arguments, 2))
