"""Tell from the stack of a rank's main thread whether the thread waits for input, and for how long it has waited.

docs/design/input.md describes the method. This module knows no framework: input is the object over which the training
loop iterates.
"""

from __future__ import annotations

import dis
import inspect
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType

from ddlcore.plug.registry import Registry

_FOR_ITER = dis.opmap["FOR_ITER"]
_CACHE = dis.opmap.get("CACHE", -1)
_OURS = "ddl"  # prefix of the names of ddl's modules


class WhoWaits:
    """Tells which frames of a stack wait for input.

    ``loaders`` holds prefixes of the names of framework modules. While the thread runs code of such a module, it counts
    as waiting for input.
    """

    def __init__(self, loaders: Sequence[str] = ()) -> None:
        self._loaders = tuple(loaders)
        self._codes: dict[CodeType, bytes] = {}
        self._trains: set[CodeType] = set()  # code that has called a function of ddl, directly or not

    def is_input(self, frame: FrameType | None) -> bool | None:
        """Return whether the thread waits for input in one sample. No frame is stored.

        ``frame`` is the innermost frame of the thread's stack, or None. The result is None if no code in the stack is
        known to call ddl. A stored frame would keep the tensors in its local variables alive. Without stored frames, the
        training loop cannot be recognized. Instead, the method looks at the innermost code in the stack that is known to
        call ddl.
        """
        frames = outermost_first(frame)
        self.note_ours(frames)
        if not any(one.f_code in self._trains for one in frames):
            return None
        waiting = self.waits(frames)
        return next(waits for one, waits in zip(reversed(frames), reversed(waiting)) if one.f_code in self._trains)

    def note_ours(self, frames: Sequence[FrameType]) -> None:
        """Remember which code in a stack calls ddl. ``frames`` are those of the stack, the outermost first."""
        ours = next((i for i, one in enumerate(frames) if _module(one).startswith(_OURS)), len(frames))
        if ours < len(frames):
            self._trains.update(one.f_code for one in frames[:ours])

    def waits(self, frames: Sequence[FrameType]) -> list[bool]:
        """Return for each frame whether the frame waits for input at the time of the sample.

        Training code is code that has called ddl in some sample. There are three cases:

        * A frame that calls ddl does not wait.
        * A frame that calls training code waits if the called frame waits.
        * Any other frame waits if it gets the next element of an iteration, or if a frame inside of it runs code of a
          module in ``loaders``.
        """
        found = [False] * len(frames)
        loading = False
        for depth in range(len(frames) - 1, -1, -1):
            one, below = frames[depth], frames[depth + 1] if depth + 1 < len(frames) else None
            if below is not None and _module(below).startswith(_OURS):
                loading = False
            elif below is not None and below.f_code in self._trains:
                found[depth] = found[depth + 1]
            else:
                gives = below is not None and (
                    below.f_code.co_flags & inspect.CO_GENERATOR or below.f_code.co_name == "__next__"
                )
                found[depth] = loading or bool(gives) or self._instruction(one) == _FOR_ITER
            loading = loading or (bool(self._loaders) and _module(one).startswith(self._loaders))
        return found

    def calls_what_trains(self, frames: Sequence[FrameType], depth: int) -> bool:
        """Return whether the frame at ``depth`` calls training code."""
        return depth + 1 < len(frames) and frames[depth + 1].f_code in self._trains

    def _instruction(self, frame: FrameType) -> int:
        code = self._codes.get(frame.f_code)
        if code is None:
            code = self._codes[frame.f_code] = frame.f_code.co_code  # this attribute makes a copy
        at = frame.f_lasti
        while at > 0 and code[at] == _CACHE:  # f_lasti may be the index of a cache entry after the instruction
            at -= 2
        return code[at] if 0 <= at < len(code) else -1


def outermost_first(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the stack whose innermost frame is ``frame``, the outermost first."""

    def outward() -> Iterator[FrameType]:
        one = frame
        while one is not None:
            yield one
            one = one.f_back

    return list(outward())[::-1]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class InputClock:
    """A clock that measures how long the thread ``ident`` has waited for input.

    The time is estimated by calls of ``sample`` at short intervals. The estimate is accurate enough for the live page,
    and cheap enough to run all the time. ``loaders`` holds prefixes of the names of framework modules; a thread that
    runs code of these modules waits for input.
    """

    def __init__(self, ident: int, loaders: Sequence[str]) -> None:
        self._ident = ident
        self._who = WhoWaits(loaders)
        self._last_s = time.perf_counter()
        self.input_s = 0.0
        self.sampled_s = 0.0  # the time of the samples in which the stack contained training code

    def sample(self) -> None:
        """Sample the thread's stack, and add the time since the last call to the totals.

        Only one thread may call this method.
        """
        waits = self._who.is_input(sys._current_frames().get(self._ident))
        now_s = time.perf_counter()
        if waits is not None:
            self.sampled_s += now_s - self._last_s
            self.input_s += now_s - self._last_s if waits else 0.0
        self._last_s = now_s


def main_thread() -> int:
    """Return the number of the process's main thread, as ``threading.get_ident`` does in that thread."""
    ident = threading.main_thread().ident
    assert ident is not None
    return ident


def loaders(registry: Registry) -> list[str]:
    """Return prefixes of the names of those modules of frameworks in which a thread waits for input."""
    return [module for provider in registry.adapters.values() for module in provider.loaders]
