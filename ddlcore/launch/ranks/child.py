"""Run one rank of ``ddlcore.run``: read a function from one inherited file, write its result to another."""

from __future__ import annotations

import os
import pickle
import sys
import traceback

import cloudpickle

from ddlcore.errors import Closed, DeadlineExceeded, PeerLost
from ddlcore.launch.ranks.exchange import Outcome, Task, read_all, write_all
from ddlcore.launch.ranks.process import die_with_launcher


def main(arguments: list[str]) -> int:
    """Read the function from a file, call it, and write its outcome to another file.

    ``arguments`` are TASK_FD, RESULT_FD and LAUNCHER_PID. Returns the exit code: 0, or 1 if the function raised.
    """
    task_fd, result_fd, launcher = map(int, arguments)
    tie = die_with_launcher(launcher)
    if tie is not None:
        tie()
    for fd in (task_fd, result_fd):
        os.set_inheritable(fd, False)
    task: Task = pickle.loads(read_all(task_fd))  # from our own parent, through a file that nobody else can open
    sys.path[:] = task.path
    sys.argv = [""]
    outcome = _call(task)
    write_all(result_fd, pickle.dumps(outcome))
    return 1 if outcome.text else 0


def _call(task: Task) -> Outcome:
    try:
        fn, args, kwargs = pickle.loads(task.call)
        return Outcome(value=cloudpickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:  # SystemExit and Ctrl-C too: the launching process reports them
        if isinstance(error, SystemExit) and not error.code and os.environ.get("DDL_ELASTIC"):
            return Outcome()  # this process has left the training, or came too late for it
        sys.last_value = error  # as the interpreter does for an uncaught exception: shutdown tells the other ranks
        return _failure(error)


def _failure(error: BaseException) -> Outcome:
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        trace = trace.tb_next  # leave out our own frame
    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # some exceptions cannot be pickled or unpickled: then only the text is sent
        pickled = b""
    return Outcome(
        error=pickled,
        text="".join(traceback.format_exception_only(type(error), error)).strip(),
        trace="".join(traceback.format_exception(type(error), error, trace)),
        secondary=isinstance(error, (PeerLost, Closed, DeadlineExceeded)),
    )
