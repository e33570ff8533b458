"""Run one rank of ``ddlcore.run``: read a function from an inherited file, call it, and write its result to a file."""

from __future__ import annotations

import os
import pickle
import sys
import traceback

import cloudpickle

from ddlcore.errors import Closed, DeadlineExceeded, PeerLost
from ddlcore.launch.ranks.exchange import RankResult, Task, read_all, write_all
from ddlcore.launch.ranks.process import die_with_launcher


def main(arguments: list[str]) -> int:
    """Read the function from one file, call it, and write its return value or its exception to another file.

    ``arguments`` are the file descriptors of the two files and the process id of the launcher, as text. Return the exit
    code of this process: 1 if the function raised an exception, otherwise 0.
    """
    task_fd, result_fd, launcher = map(int, arguments)
    tie = die_with_launcher(launcher)
    if tie is not None:
        tie()
    for fd in (task_fd, result_fd):
        os.set_inheritable(fd, False)
    task: Task = pickle.loads(read_all(task_fd))  # from the parent process, in a file that no other process can open
    sys.path[:] = task.path
    sys.argv = [""]
    outcome = _call(task)
    write_all(result_fd, pickle.dumps(outcome))
    return 1 if outcome.text else 0


def _call(task: Task) -> RankResult:
    try:
        fn, args, kwargs = pickle.loads(task.call)
        return RankResult(value=cloudpickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:  # SystemExit and Ctrl-C too: the launching process reports them
        if isinstance(error, SystemExit) and not error.code and os.environ.get("DDL_ELASTIC"):
            return RankResult()  # this process has left the training, or was started too late to join the training
        sys.last_value = error  # as the interpreter does for an uncaught exception: shutdown reports it to other ranks
        return _failure(error)


def _failure(error: BaseException) -> RankResult:
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        trace = trace.tb_next  # leave out the frame of this module
    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # some exceptions cannot be pickled or unpickled: then only the text is sent
        pickled = b""
    return RankResult(
        error=pickled,
        text="".join(traceback.format_exception_only(type(error), error)).strip(),
        trace="".join(traceback.format_exception(type(error), error, trace)),
        secondary=isinstance(error, (PeerLost, Closed, DeadlineExceeded)),
    )
