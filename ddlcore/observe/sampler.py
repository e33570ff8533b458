"""Sample the stack of a rank's main thread, and compute for which share of a step the thread waits for input.

The method is described in docs/design/input.md. This module knows no framework: input is whatever the training loop
iterates over.
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

from ddlcore.messages import Profile

WARM_STEPS = 3  # compilation, first page faults and negotiation distort the first steps
LEAST_STEPS = 2  # steps that a frame must see to count as the loop
_MOST_OF = 0.6  # share of all steps that the loop's own frame must see
_LINES = 8  # lines of the loop that are reported at most
_FOR_ITER = dis.opmap["FOR_ITER"]
_CACHE = dis.opmap.get("CACHE", -1)
_OURS = "ddl"  # prefix of the names of ddl's modules


@dataclass
class _Node:
    """One frame of the sampled stack, with the time that the samples found at each of its lines."""

    frame: FrameType
    depth: int
    first_step: int
    within_input: bool
    last_step: int = 0
    lines: dict[int, list[float]] = field(default_factory=dict)  # by line number: seconds, of these waiting for input

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step


@dataclass
class _Loop:
    """The totals over all frames of one code object, which may be the training loop."""

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

    ``loaders``: prefixes of the names of framework modules; while the thread is inside such a module, it counts as
    waiting for input.
    """

    def __init__(self, loaders: Sequence[str] = ()) -> None:
        self._loaders = tuple(loaders)
        self._stack: list[_Node] = []
        self._loops: dict[CodeType, _Loop] = {}
        self._codes: dict[CodeType, bytes] = {}
        self._trains: set[CodeType] = set()  # code that has called a function of ddl, directly or not
        self._first_step = self._steps = -1

    def take(self, frame: FrameType | None, steps: int, seconds: float) -> None:
        """Add the sample ``frame``, which stands for ``seconds`` of time and was taken when ``steps`` steps were done."""
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
        """Return whether the thread waits for input in the sample ``frame``, which is not added to the totals.

        Returns None if the stack contains no training code, or none that is known. In contrast to ``take``, this keeps
        no frame alive, and so none of the tensors in its local variables. The innermost training code in the stack
        stands for the loop, which could not be recognized without frames from earlier samples.
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
        """Return the profile of all samples so far. It has 0 steps if no training loop was recognized in the samples."""
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
        """Return the totals of the training loop: of the innermost code whose frames stayed during most of the steps.

        Returns None if there is no such code.
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
        """Return for each frame whether it is waiting for input at this moment.

        A frame that has called ddl does not wait. A frame that has called training code (code that calls ddl at some
        time) waits if the called frame waits. Any other frame waits if it is fetching the next element of an iteration,
        or if what it has called is inside ``loaders``.
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
        while at > 0 and code[at] == _CACHE:  # it may point at a cache entry of the instruction
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
    """The time for which thread ``ident`` has waited for input, counted by calls of ``sample`` at short intervals.

    ``loaders`` is explained at ``Stacks``. It is accurate enough to be watched, and cheap enough to run all the time.
    """

    def __init__(self, ident: int, loaders: Sequence[str]) -> None:
        self._ident = ident
        self._stacks = Stacks(loaders)
        self._last_s = time.perf_counter()
        self.input_s = 0.0
        self.sampled_s = 0.0  # the time that the samples of a stack with training code stand for

    def sample(self) -> None:
        """Look at the thread's stack, and count the time since the last call. One thread alone calls this."""
        waits = self._stacks.is_input(sys._current_frames().get(self._ident))
        now_s = time.perf_counter()
        if waits is not None:
            self.sampled_s += now_s - self._last_s
            self.input_s += now_s - self._last_s if waits else 0.0
        self._last_s = now_s


class Sampler:
    """A thread that samples the stack of thread ``ident`` every ``interval_s``.

    ``steps`` returns how many steps are done. When the first steps are over, ``tell`` gets the profile once a second.
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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, which calls ``tell`` a last time.

        Any thread except the sampler's own may call this, more than once.
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
