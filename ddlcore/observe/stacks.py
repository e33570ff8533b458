"""Show what the threads of this process are doing, as Python stacks.

The thread that asks for them must get the GIL.
"""

from __future__ import annotations

import sys
import threading
import traceback

INNERMOST = 30  # frames
LARGEST = 8192  # characters


def stack_of(ident: int) -> str:
    """Return the stack of thread ``ident``, innermost call last. If that thread has ended, return the main thread's
    stack.

    A native call appears as the Python line that makes it.
    """
    frames = sys._current_frames()
    frame = frames.get(ident) or frames.get(threading.main_thread().ident or 0)
    if frame is None:
        return "the thread has ended\n"
    lines = traceback.format_list(traceback.extract_stack(frame)[-INNERMOST:])
    return "".join(lines)[-LARGEST:]


def all_stacks() -> dict[str, list[str]]:
    """Return the stacks of all Python threads, by the name of the thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, f"thread {ident}"): "".join(traceback.format_stack(frame)[-INNERMOST:]).splitlines()
        for ident, frame in sys._current_frames().items()
    }
