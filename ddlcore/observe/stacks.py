"""Return the Python stacks of the threads of this process, as text.

The functions need the GIL. If another thread does not release the GIL, they wait.
"""

from __future__ import annotations

import sys
import threading
import traceback

INNERMOST = 30  # frames
LARGEST = 8192  # characters


def stack_of(ident: int) -> str:
    """Return the stack of the thread ``ident`` as text, the innermost call last.

    If that thread has ended, return the stack of the main thread. Of a native call, only the Python line that makes the
    call is shown. The text has at most 30 frames and 8192 characters.
    """
    frames = sys._current_frames()
    frame = frames.get(ident) or frames.get(threading.main_thread().ident or 0)
    if frame is None:
        return "the thread has ended\n"
    lines = traceback.format_list(traceback.extract_stack(frame)[-INNERMOST:])
    return "".join(lines)[-LARGEST:]


def all_stacks() -> dict[str, list[str]]:
    """Return the stacks of all Python threads, as lines of text, by the name of the thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, f"thread {ident}"): "".join(traceback.format_stack(frame)[-INNERMOST:]).splitlines()
        for ident, frame in sys._current_frames().items()
    }
