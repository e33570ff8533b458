"""Sample the stack of a rank's main thread, and compute the share of a step in which the thread waits for input.

docs/design/input.md describes the method. This module knows no framework: input is the object over which the training
loop iterates.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType

from ddl_doctor.input_clock import WhoWaits, loaders, main_thread, outermost_first
from ddl_doctor.reports import Profile, to_send
from ddlcore.process.observers import ObservedRank, RankObserver
from ddlcore.threads import OwnThread

WARM_STEPS = 3  # compilation, first page faults and negotiation distort the first steps
LEAST_STEPS = 2  # a frame can be the frame of the loop only if at least so many steps are done while it exists
_MOST_OF = 0.6  # and only if at least this share of all steps is done while it exists
_LINES = 8  # at most so many lines of the loop are reported


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


class Stacks(WhoWaits):
    """The totals over the samples of one thread's stack.

    ``loaders`` holds prefixes of the names of framework modules. While the thread runs code of such a module, it counts
    as waiting for input.
    """

    def __init__(self, loaders: Sequence[str] = ()) -> None:
        super().__init__(loaders)
        self._stack: list[_Node] = []
        self._loops: dict[CodeType, _Loop] = {}
        self._first_step = self._steps = -1

    def take(self, frame: FrameType | None, steps: int, seconds: float) -> None:
        """Add a sample to the totals.

        ``frame`` is the innermost frame of the thread's stack, or None. ``steps`` is the number of steps done so far,
        and ``seconds`` is the time since the last sample.
        """
        frames = outermost_first(frame)
        if self._first_step < 0:
            self._first_step = steps
        self._steps = steps
        self.note_ours(frames)
        same = 0
        while same < min(len(frames), len(self._stack)) and self._stack[same].frame is frames[same]:
            same += 1
        for node in self._stack[same:]:
            _join(self._loops, node)
        del self._stack[same:]
        within, waiting = False, self.waits(frames)
        for depth, one in enumerate(frames):
            if depth >= same:
                self._stack.append(_Node(one, depth, steps, within))
            node = self._stack[depth]
            node.last_step = steps
            line = node.lines.setdefault(one.f_lineno, [0.0, 0.0])
            line[0] += seconds
            if waiting[depth]:
                line[1] += seconds
            within = within or (waiting[depth] and not self.calls_what_trains(frames, depth))

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


def _join(loops: dict[CodeType, _Loop], node: _Node) -> None:
    if node.steps >= LEAST_STEPS and not node.within_input:
        loops.setdefault(node.frame.f_code, _Loop(node.frame.f_code, node.depth)).add(node)


class Samples(RankObserver):
    """A thread that samples the stack of a rank's main thread every ``sample_ms`` milliseconds.

    The first steps do not count. After them, the thread sends the profile to the launcher once a second.
    """

    def __init__(self, rank: ObservedRank) -> None:
        self._ident = main_thread()
        self._interval_s = rank.settings.number("sample_ms") / 1000
        self._steps = rank.tensor_queue.steps
        self._stacks = Stacks(loaders(rank.registry))
        self._tell = rank.tell
        self._end = threading.Event()
        self._thread = OwnThread(target=self._run, name=f"ddl-sampler-{rank.rank}")
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait up to 2 s for its end. The thread sends the profile once more before it ends.

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
                self._tell(to_send(self._stacks.profile()))
        if warm:
            self._tell(to_send(self._stacks.profile()))
        self._stacks.clear()  # frames keep their local variables alive
