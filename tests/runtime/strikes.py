"""Raises where a signal handler could: at the n-th such place in ddl's own code, one place after the other."""

from __future__ import annotations

import dis
import sys
from _thread import get_ident
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

__all__ = ["Strike", "each_place", "strike"]

# Behind which CPython looks for signals: calls, the turn of a loop, the beginning of a function.
LOOKS = {
    number
    for name, number in dis.opmap.items()
    if name.startswith(("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME"))
}
FILES = ("/ddlcore/", "/threading.py")


class Strike(BaseException):
    """What the handler raises."""


class _Counter:
    """Counts the places that one thread passes in ddl's own code, and raises Strike at the one with the number ``at``."""

    def __init__(self, at: int) -> None:
        self.left = at
        self._thread = get_ident()
        self._last: dict[FrameType, int] = {}
        self._codes: dict[CodeType, bytes] = {}  # to read ``co_code`` makes it anew each time

    def passes(self, frame: FrameType, offset: int) -> None:
        """Take note that ``frame`` is about to run its instruction at ``offset``."""
        if get_ident() != self._thread or self.left < 0:
            return
        last = self._last.get(frame, -1)
        code = self._codes.get(frame.f_code) or self._codes.setdefault(frame.f_code, frame.f_code.co_code)
        self._last[frame] = code[offset]
        if last in LOOKS:
            self.left -= 1
            if self.left < 0:
                raise Strike


def _is_ours(code: CodeType) -> bool:
    return any(part in code.co_filename for part in FILES)


if sys.version_info >= (3, 12):  # there, a frame whose tracing begins at its call reports no instructions

    def _counted(counter: _Counter, call: Callable[[], object]) -> None:
        """Make ``call``, and report each instruction of ddl's own code to ``counter``."""
        tool, event = sys.monitoring.OPTIMIZER_ID, sys.monitoring.events.INSTRUCTION

        def runs(code: CodeType, offset: int) -> object:
            if not _is_ours(code):
                return sys.monitoring.DISABLE
            counter.passes(sys._getframe(1), offset)
            return None

        sys.monitoring.use_tool_id(tool, "strikes")
        sys.monitoring.register_callback(tool, event, runs)
        sys.monitoring.set_events(tool, event)
        try:
            call()
        finally:
            sys.monitoring.set_events(tool, 0)
            sys.monitoring.free_tool_id(tool)

else:

    def _counted(counter: _Counter, call: Callable[[], object]) -> None:
        """Make ``call``, and report each instruction of ddl's own code to ``counter``."""

        def enter(frame: FrameType, event: str, arg: object) -> Any:
            if not _is_ours(frame.f_code):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return step

        def step(frame: FrameType, event: str, arg: object) -> Any:
            if event == "opcode":
                counter.passes(frame, frame.f_lasti)
            return step

        before = sys.gettrace()
        sys.settrace(enter)
        try:
            call()
        finally:
            sys.settrace(before)


def strike(at: int, call: Callable[[], object]) -> bool:
    """Makes ``call``, and raises at the ``at``-th place within it. False if there are not so many: it came to its end."""
    try:
        _counted(_Counter(at), call)
    except Strike:
        return True
    return False


def each_place(scene: Callable[[int], bool]) -> int:
    """Plays ``scene(n)``, which says whether its call was struck, for each place; how many there were."""
    places = 0
    while scene(places):
        places += 1
        assert places < 2000, "the scene has no end"
    return places
