"""Raises where a signal handler could: at the n-th such place in ddl's own code, one place after the other."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
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


class _Tracer:
    def __init__(self, at: int) -> None:
        self.left = at
        self._last: dict[FrameType, int] = {}

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in FILES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            last = self._last.get(frame, -1)
            self._last[frame] = frame.f_code.co_code[frame.f_lasti]
            if last in LOOKS:
                self.left -= 1
                if self.left < 0:
                    sys.settrace(None)
                    raise Strike
        return self.step


def strike(at: int, call: Callable[[], object]) -> bool:
    """Makes ``call``, and raises at the ``at``-th place within it. False if there are not so many: it came to its end."""
    tracer = _Tracer(at)
    before = sys.gettrace()
    sys.settrace(tracer.enter)
    try:
        call()
    except Strike:
        return True
    finally:
        sys.settrace(before)
    return False


def each_place(scene: Callable[[int], bool]) -> int:
    """Plays ``scene(n)``, which says whether its call was struck, for each place; how many there were."""
    places = 0
    while scene(places):
        places += 1
        assert places < 2000, "the scene has no end"
    return places
