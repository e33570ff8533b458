"""Decide how a run ended: which rank failed first, with which exit code, and in which words. It does nothing else."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlcore.control.liveness import describe_exit
from ddlcore.text.ranks import ranks_text

STOPPED = 85  # ERESTART, and the code that HTCondor's manual uses for "has saved a checkpoint, run me again"


class NotStarted(Exception):
    """Raised when no rank was started. Its message is one line with the reason."""

    def __init__(self, text: str, code: int = 2, hosts: Mapping[str, Sequence[str]] | None = None) -> None:
        """Create the exception. ``code`` is the exit code with which the launcher ends.

        ``hosts`` lists the problems of each host that cannot take part, if these are the reason.
        """
        self.code = code
        self.hosts = dict(hosts or {})
        super().__init__(text)


@dataclass(frozen=True)
class End:
    """How and when one rank ended."""

    rank: int
    returncode: int  # as in subprocess: the negative signal number if a signal ended it
    at_s: float  # time of the end, monotonic clock
    stopped: bool = False  # the launcher had told it to end, so its return code says nothing about the job
    lost: str = ""  # why the rank counts as lost although its end was not seen; "": it was seen
    silent: str = ""  # what is known of a rank that was killed because it did not answer after a stall
    certain: bool = True  # false if its host is only silent, so that the process may live

    @property
    def failed(self) -> bool:
        return self.returncode != 0 and not self.stopped

    @property
    def reason(self) -> str:
        """The end in words, such as "exited with code 3"."""
        if self.silent:
            return f"{describe_exit(self.returncode)} by the launcher: {self.silent}"
        return self.lost or describe_exit(self.returncode)


def first_failure(ends: Sequence[End], raised: Sequence[int] = ()) -> End | None:
    """Return the end of the rank whose failure explains the other ends, or None if no rank failed by itself.

    It is a rank that was killed because it did not answer, otherwise the first rank in ``raised`` that failed,
    otherwise the rank that ended first. ``raised`` are the ranks that reported an exception, in the order of their
    reports. They take precedence because a rank may report its exception first and yet end after another rank, which
    failed only because it lost that rank.
    """
    failed = {end.rank: end for end in ends if end.failed}
    silent = [end for end in ends if end.failed and end.silent]
    if silent:  # the other ranks have ended because of it
        return silent[0]
    for rank in raised:
        if rank in failed:
            return failed[rank]
    return min(failed.values(), key=lambda end: end.at_s, default=None)


def shell_code(returncode: int) -> int:
    """Return the exit code that a shell reports: 128 + the signal number if a signal ended the process."""
    return returncode if returncode >= 0 else 128 - returncode


def exit_code(ends: Sequence[End], raised: Sequence[int] = (), *, killed: bool = False, stopped: bool = False) -> int:
    """Return the exit code of the run whose ranks ended with ``ends``.

    ``killed`` says that all ranks were killed, as by a second Ctrl-C. ``stopped`` says that the ranks had agreed to
    stop, see ``should_stop``: if all of them then ended with 0, the code is STOPPED, because the training is not
    complete and can be started again from its checkpoint.
    """
    first = first_failure(ends, raised)
    if first is not None:
        return shell_code(first.returncode)
    if killed:
        return 128 + signal.SIGINT
    if any(end.returncode for end in ends):
        return 1
    return STOPPED if stopped else 0


def summary(
    ends: Sequence[End], first: End, host: str, last_lines: Sequence[str], after_s: float, wrote: bool = False
) -> str:
    """Return the text that is shown when a rank failed. ``first`` is the end of the rank that failed first.

    ``host`` is the host of that rank, ``last_lines`` are the last lines that it wrote, and ``after_s`` is the time in
    seconds from the start to the failure. ``wrote`` says that it wrote something, even if that left no line, such as a
    progress bar.
    """
    text = [f"rank {first.rank} on {host} failed first: it {_described(first, f' after {after_s:.1f} s')}"]
    if last_lines:
        text.append(f"  its last {'line' if len(last_lines) == 1 else 'lines'}:")
        text += [f"  | {line}" for line in last_lines]
    elif not wrote:
        # The output of a rank that was lost with its host may not have arrived.
        text.append("  none of its output has arrived" if first.lost else "  it wrote nothing")
    others: dict[str, list[int]] = {}
    for end in sorted(ends, key=lambda end: end.rank):
        if end.rank != first.rank:
            others.setdefault("was ended by the launcher" if end.stopped else _described(end), []).append(end.rank)
    for how, ranks in others.items():
        text.append(f"  {ranks_text(ranks)}: {how if len(ranks) == 1 else re.sub('^was ', 'were ', how)}")
    return "\n".join(text)


def _described(end: End, when: str = "") -> str:
    """Return the end in words that follow "it". ``when``, such as " after 3.0 s", is put where no reason precedes it."""
    if end.lost:
        return f"was lost{when}: {end.lost}"
    how = describe_exit(end.returncode)
    if end.silent:
        return f"was {how} by the launcher{when}: {end.silent}"
    return (f"was {how}" if how.startswith("killed") else how) + when
