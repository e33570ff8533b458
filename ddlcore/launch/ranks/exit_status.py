"""Find out how a run has ended: which rank failed first, which exit code follows, and how to describe this in words."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlcore.control.liveness import describe_exit
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.text.ranks import ranks_text

STOPPED = 85  # ERESTART; HTCondor's manual uses this code for "has saved a checkpoint, run me again"


class NotStarted(Exception):
    """Raised if no rank was started. The message is one line with the reason."""

    def __init__(self, text: str, code: int = 2, hosts: Mapping[str, Sequence[str]] | None = None) -> None:
        """Create the exception with the message ``text``. ``code`` is the exit code with which the launcher ends.

        If hosts cannot take part, ``hosts`` has the problems of each of these hosts by the name of the host.
        """
        self.code = code
        self.hosts = dict(hosts or {})
        super().__init__(text)


@dataclass(frozen=True)
class End:
    """The end of one process of a rank: its time, its return code and its reason."""

    rank: LaunchedRank
    returncode: int  # as in subprocess: the negative signal number if a signal ended the process
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
        """The end of the process in words, such as "exited with code 3"."""
        if self.silent:
            return f"{describe_exit(self.returncode)} by the launcher: {self.silent}"
        return self.lost or describe_exit(self.returncode)


def first_failure(ends: Sequence[End], raised: Sequence[LaunchedRank] = ()) -> End | None:
    """Return the end of the rank whose failure explains the other ends, or None if no rank failed by itself.

    ``raised`` has the ranks that have reported an exception, in the order of their reports. If a rank was killed
    because it did not answer, return the end of this rank. Otherwise, if a rank in ``raised`` has failed, return the
    end of the first such rank. Otherwise return the failure that happened first. Ranks in ``raised`` take precedence:
    the rank whose exception is the cause may end later than another rank that failed only because of this exception.
    """
    failed = {end.rank: end for end in ends if end.failed}
    silent = [end for end in ends if end.failed and end.silent]
    if silent:  # the other ranks have ended because of this rank
        return silent[0]
    for rank in raised:
        if rank in failed:
            return failed[rank]
    return min(failed.values(), key=lambda end: end.at_s, default=None)


def shell_code(returncode: int) -> int:
    """Return the exit code that a shell reports for ``returncode``, a return code of ``subprocess``.

    If a signal ended the process, this is 128 + the signal number.
    """
    return returncode if returncode >= 0 else 128 - returncode


def exit_code(
    ends: Sequence[End], raised: Sequence[LaunchedRank] = (), *, killed: bool = False, stopped: bool = False
) -> int:
    """Return the exit code of the run whose ranks ended with ``ends``.

    ``raised`` has the ranks that have reported an exception. ``killed`` means that all ranks were killed, for example
    by a second Ctrl-C. ``stopped`` means that the ranks have agreed to stop, see ``should_stop``. If the ranks have
    agreed to stop and all ranks ended with 0, the exit code is STOPPED: the training is not complete and can be started
    again from its checkpoint.
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
    """Return the text that is shown to the user when a rank has failed.

    ``ends`` has the ends of all ranks, and ``first`` is the end of the rank that failed first. ``host`` is the host
    name of that rank, ``last_lines`` has the last lines that the rank wrote, and ``after_s`` is the time in seconds
    from the start to the failure. ``wrote`` says whether the rank wrote any output. The rank may have written output
    even if ``last_lines`` is empty: a progress bar, for example, leaves no line.
    """
    text = [f"rank {first.rank} on {host} failed first: it {_described(first, f' after {after_s:.1f} s')}"]
    if last_lines:
        text.append(f"  its last {'line' if len(last_lines) == 1 else 'lines'}:")
        text += [f"  | {line}" for line in last_lines]
    elif not wrote:
        # The output of a rank that was lost with its host may not have arrived.
        text.append("  none of its output has arrived" if first.lost else "  it wrote nothing")
    others: dict[str, list[LaunchedRank]] = {}
    for end in sorted(ends, key=lambda end: end.rank):
        if end.rank != first.rank:
            others.setdefault("was ended by the launcher" if end.stopped else _described(end), []).append(end.rank)
    for how, ranks in others.items():
        text.append(f"  {ranks_text(ranks)}: {how if len(ranks) == 1 else re.sub('^was ', 'were ', how)}")
    return "\n".join(text)


def _described(end: End, when: str = "") -> str:
    """Return the end in words that continue a sentence whose subject is the rank, such as "exited with code 3".

    ``when`` is a time in words, such as " after 3.0 s". It is added before the reason of the end, if there is a reason.
    """
    if end.lost:
        return f"was lost{when}: {end.lost}"
    how = describe_exit(end.returncode)
    if end.silent:
        return f"was {how} by the launcher{when}: {end.silent}"
    return (f"was {how}" if how.startswith("killed") else how) + when
