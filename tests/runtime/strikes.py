"""Raises where a signal handler could: at the n-th such place in ddl's own code, one place after the other."""

from __future__ import annotations

import dis
import sys
from _thread import get_ident
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

__all__ = ["Strike", "each_place", "strike"]

FILES = ("/ddlcore/", "/threading.py")


class Strike(BaseException):
    """What the handler raises."""


class _Counter:
    """Counts the places that one thread passes in ddl's own code, and raises Strike at the one with the number ``at``."""

    def __init__(self, at: int) -> None:
        self.left = at
        self._thread = get_ident()
        self._codes: dict[CodeType, bytes] = {}  # to read ``co_code`` makes it anew each time

    def opcode(self, code: CodeType, offset: int) -> int:
        """Return the instruction of ``code`` at ``offset``."""
        return (self._codes.get(code) or self._codes.setdefault(code, code.co_code))[offset]

    def place(self) -> None:
        """Take note that the calling thread is at a place where a signal handler may run."""
        if get_ident() == self._thread and self.left >= 0:
            self.left -= 1
            if self.left < 0:
                raise Strike


def _is_ours(code: CodeType) -> bool:
    return any(part in code.co_filename for part in FILES)


if sys.version_info >= (3, 12):
    # On these versions, Strike is raised exactly where CPython runs signal handlers: where a function begins or a
    # generator goes on, where a function written in C has returned, and at a backward jump. The instruction matters: it
    # decides which ``with`` and ``try`` see the exception.
    JUMPS_BACK = dis.opmap["JUMP_BACKWARD"]

    def _counted(counter: _Counter, call: Callable[[], object]) -> None:
        """Call ``call``. Tell ``counter`` of each place in ddl's own code where a signal handler may run."""
        tool, events = sys.monitoring.OPTIMIZER_ID, sys.monitoring.events

        def begins(code: CodeType, offset: int) -> object:
            return counter.place() if _is_ours(code) else sys.monitoring.DISABLE

        def runs(code: CodeType, offset: int) -> object:
            if not _is_ours(code):
                return sys.monitoring.DISABLE
            return counter.place() if counter.opcode(code, offset) == JUMPS_BACK else None

        def returns(code: CodeType, offset: int, function: object, first: object) -> object:
            return counter.place() if _is_ours(code) else None

        callbacks = {
            events.PY_START: begins,
            events.PY_RESUME: begins,
            events.INSTRUCTION: runs,
            events.CALL: None,  # without it there is no C_RETURN
            events.C_RETURN: returns,
        }
        sys.monitoring.use_tool_id(tool, "strikes")
        for event, callback in callbacks.items():
            sys.monitoring.register_callback(tool, event, callback)
        sys.monitoring.set_events(tool, events.PY_START | events.PY_RESUME | events.INSTRUCTION | events.CALL)
        try:
            call()
        finally:
            sys.monitoring.set_events(tool, 0)
            sys.monitoring.free_tool_id(tool)

else:
    # Behind which CPython looks for signals: calls, the turn of a loop, the beginning of a function.
    LOOKS = {
        number
        for name, number in dis.opmap.items()
        if name.startswith(("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME"))
    }

    def _counted(counter: _Counter, call: Callable[[], object]) -> None:
        """Call ``call``. Tell ``counter`` of each place in ddl's own code where a signal handler may run."""
        last: dict[FrameType, int] = {}

        def enter(frame: FrameType, event: str, arg: object) -> Any:
            if not _is_ours(frame.f_code):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return step

        def step(frame: FrameType, event: str, arg: object) -> Any:
            if event == "opcode":
                before, last[frame] = last.get(frame, -1), counter.opcode(frame.f_code, frame.f_lasti)
                if before in LOOKS:
                    counter.place()
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
