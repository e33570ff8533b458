"""Raise the limit of open files of this process, so that it is high enough for the connections of a job.

If that fails, the error message tells the user what to do.
"""

from __future__ import annotations

import resource

from ddlcore.errors import DdlInternalError

_PER_RANK = 3  # its channel, a connection of its store, and one to spare
_PER_RANK_TCP = 6  # its channel and a connection of its store: three files for each, see TcpProxy
_OWN = 128  # files of the process itself
_STRANGERS = 512  # for TCP connections that have shown no key: fewer of them if the hard limit is lower


def allow_files(ranks: int, *, tcp: bool = False) -> None:
    """Raise this process's soft limit of open files, so that it is enough for the connections of ``ranks`` ranks.

    The limit is never lowered. Set ``tcp`` if the ranks may connect by TCP: such a connection needs more files.
    Processes that are started later inherit the limit. Raises DdlInternalError if the hard limit is too low.
    """
    needed = (_PER_RANK_TCP if tcp else _PER_RANK) * ranks + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + (_STRANGERS if tcp else 0)
    if needed <= hard < wanted:
        wanted = hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ValueError("beyond the hard limit")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):  # OSError: the system has a lower limit of its own
        limit = "unlimited" if hard == resource.RLIM_INFINITY else hard
        raise DdlInternalError(
            f"control network: {ranks} ranks need {needed} open files, and this process may open {soft} "
            f"(hard limit: {limit}); run `ulimit -n {needed}` first, as root or after raising the hard limit"
        ) from None
