"""Sample the stack of a rank's main thread, and compute the share of a step in which the thread waits for input.

docs/design/input.md describes the method. This module knows no framework: input is the object over which the training
loop iterates.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType

from ddlcore.messages.observing import Profile
from ddlcore.threads import OwnThread

WARM_STEPS = 3  # compilation, first page faults and negotiation distort the first steps
LEAST_STEPS = 2  # a frame can be the frame of the loop only if at least so many steps are done while it exists
_MOST_OF = 0.6  # and only if at least this share of all steps is done while it exists
_LINES = 8  # at most so many lines of the loop are reported
_FOR_ITER = dis.opmap["FOR_ITER"]
_CACHE = dis.opmap.get("CACHE", -1)
_OURS = "ddl"  # prefix of the names of ddl's modules


@dataclass
class _Node:
    """One frame of the sampled stack, with the time that the thread spent in each line of the frame."""

    frame: FrameType
    depth: int
    first_step: int
    within_input: bool
    last_step: int = 0
    lines: dict[int, list[float]] = field(default_factory=dict)  # by line: [all seconds, of these waiting for input]

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step


@dataclass
class _Loop:
    """The totals over all frames of one code object. The training loop may be in this code."""

    code: CodeType
    depth: int
    steps: int = 0
    lines: dict[int, list[float]] = field(default_factory=dict)

    def add(self, node: _Node) -> None:
        self.steps += node.steps
        for line, (seconds, input_s) in node.lines.items():
            one = self.lines.setdefault(line, [0.0, 0.0])
            one[0] += seconds
            one[1] += input_s

    def copy(self) -> _Loop:
        return _Loop(self.code, self.depth, self.steps, {line: list(one) for line, one in self.lines.items()})


class Stacks:
    """The totals over the samples of one thread's stack.

    ``loaders`` holds prefixes of the names of framework modules. While the thread runs code of such a module, it counts
    as waiting for input.
    """

    def __init__(self, loaders: Sequence[str] = ()) -> None:
        self._loaders = tuple(loaders)
        self._stack: list[_Node] = []
        self._loops: dict[CodeType, _Loop] = {}
        self._codes: dict[CodeType, bytes] = {}
        self._trains: set[CodeType] = set()  # code that has called a function of ddl, directly or not
        self._first_step = self._steps = -1

    def take(self, frame: FrameType | None, steps: int, seconds: float) -> None:
        """Add a sample to the totals.

        ``frame`` is the innermost frame of the thread's stack, or None. ``steps`` is the number of steps done so far,
        and ``seconds`` is the time since the last sample.
        """
        frames = _outermost_first(frame)
        if self._first_step < 0:
            self._first_step = steps
        self._steps = steps
        self._note_ours(frames)
        same = 0
        while same < min(len(frames), len(self._stack)) and self._stack[same].frame is frames[same]:
            same += 1
        for node in self._stack[same:]:
            _join(self._loops, node)
        del self._stack[same:]
        within, waiting = False, self._waits(frames)
        for depth, one in enumerate(frames):
            if depth >= same:
                self._stack.append(_Node(one, depth, steps, within))
            node = self._stack[depth]
            node.last_step = steps
            line = node.lines.setdefault(one.f_lineno, [0.0, 0.0])
            line[0] += seconds
            if waiting[depth]:
                line[1] += seconds
            within = within or (waiting[depth] and not self._calls_what_trains(frames, depth))

    def is_input(self, frame: FrameType | None) -> bool | None:
        """Return whether the thread waits for input in one sample. The sample is not added to the totals.

        ``frame`` is the innermost frame of the thread's stack, or None. The result is None if no code in the stack is
        known to call ddl. Unlike ``take``, this method stores no frame, because a stored frame keeps the tensors in its
        local variables alive. Without stored frames, the training loop cannot be recognized. Instead, the method looks
        at the innermost code in the stack that is known to call ddl.
        """
        frames = _outermost_first(frame)
        self._note_ours(frames)
        if not any(one.f_code in self._trains for one in frames):
            return None
        waiting = self._waits(frames)
        return next(waits for one, waits in zip(reversed(frames), reversed(waiting)) if one.f_code in self._trains)

    def clear(self) -> None:
        """Forget all samples."""
        self._stack.clear()
        self._loops.clear()
        self._first_step = -1

    def profile(self) -> Profile:
        """Return the profile of all samples so far: the time that the thread spent in the lines of the training loop.

        The profile has 0 steps if no training loop was recognized in the samples.
        """
        loop = self._loop()
        if loop is None:
            return Profile(0, 0.0, 0.0, "", ())
        total_s, input_s = (sum(one[i] for one in loop.lines.values()) for i in range(2))
        longest = sorted(loop.lines.items(), key=lambda item: -item[1][0])[:_LINES]
        name = os.path.basename(loop.code.co_filename)
        lines = tuple(
            (f"{name}:{line}", linecache.getline(loop.code.co_filename, line).strip(), seconds[0], seconds[1])
            for line, seconds in longest
        )
        return Profile(loop.steps, total_s, input_s, f"{loop.code.co_name} in {name}", lines)

    def _loop(self) -> _Loop | None:
        """Return the totals of the training loop, or None if no training loop was recognized.

        The training loop is in the innermost code whose frames existed during most of the steps.
        """
        loops = {code: one.copy() for code, one in self._loops.items()}
        for node in self._stack:
            _join(loops, node)
        all_steps = self._steps - self._first_step
        fitting = [loop for loop in loops.values() if loop.steps >= max(LEAST_STEPS, _MOST_OF * all_steps)]
        return max(fitting, key=lambda loop: loop.depth, default=None)

    def _note_ours(self, frames: Sequence[FrameType]) -> None:
        ours = next((i for i, one in enumerate(frames) if _module(one).startswith(_OURS)), len(frames))
        if ours < len(frames):
            self._trains.update(one.f_code for one in frames[:ours])

    def _waits(self, frames: Sequence[FrameType]) -> list[bool]:
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

    def _calls_what_trains(self, frames: Sequence[FrameType], depth: int) -> bool:
        return depth + 1 < len(frames) and frames[depth + 1].f_code in self._trains

    def _instruction(self, frame: FrameType) -> int:
        code = self._codes.get(frame.f_code)
        if code is None:
            code = self._codes[frame.f_code] = frame.f_code.co_code  # this attribute makes a copy
        at = frame.f_lasti
        while at > 0 and code[at] == _CACHE:  # f_lasti may be the index of a cache entry after the instruction
            at -= 2
        return code[at] if 0 <= at < len(code) else -1


def _join(loops: dict[CodeType, _Loop], node: _Node) -> None:
    if node.steps >= LEAST_STEPS and not node.within_input:
        loops.setdefault(node.frame.f_code, _Loop(node.frame.f_code, node.depth)).add(node)


def _outermost_first(frame: FrameType | None) -> list[FrameType]:
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
        self._stacks = Stacks(loaders)
        self._last_s = time.perf_counter()
        self.input_s = 0.0
        self.sampled_s = 0.0  # the time of the samples in which the stack contained training code

    def sample(self) -> None:
        """Sample the thread's stack, and add the time since the last call to the totals.

        Only one thread may call this method.
        """
        waits = self._stacks.is_input(sys._current_frames().get(self._ident))
        now_s = time.perf_counter()
        if waits is not None:
            self.sampled_s += now_s - self._last_s
            self.input_s += now_s - self._last_s if waits else 0.0
        self._last_s = now_s


class Sampler:
    """A thread that samples the stack of the thread ``ident`` every ``interval_s`` seconds.

    ``steps`` returns the number of steps done so far. The first steps do not count. After them, ``tell`` is called with
    the profile once a second. ``loaders`` is passed to ``Stacks``, and ``name`` is the name of the thread.
    """

    def __init__(
        self,
        ident: int,
        interval_s: float,
        steps: Callable[[], int],
        loaders: Sequence[str],
        tell: Callable[[Profile], None],
        name: str,
    ) -> None:
        self._ident = ident
        self._interval_s = interval_s
        self._steps = steps
        self._stacks = Stacks(loaders)
        self._tell = tell
        self._end = threading.Event()
        self._thread = OwnThread(target=self._run, name=name)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait up to 2 s for its end. The thread calls ``tell`` once more before it ends.

        Any thread except the sampler's own thread may call this method, also more than once.
        """
        self._end.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        warm = False
        first = -1
        last_s = told_s = time.perf_counter()
        while not self._end.wait(self._interval_s):
            steps = self._steps()
            frame = sys._current_frames().get(self._ident)
            now_s = time.perf_counter()
            self._stacks.take(frame, steps, now_s - last_s)
            last_s = now_s
            del frame
            if steps > 0 and first < 0:
                first = steps
            if not warm:
                warm = first >= 0 and steps >= first + WARM_STEPS
                if warm:
                    self._stacks.clear()
            elif now_s - told_s >= 1.0:
                told_s = now_s
                self._tell(self._stacks.profile())
        if warm:
            self._tell(self._stacks.profile())
        self._stacks.clear()  # frames keep their local variables alive
