"""The default group of a process whose peers come and go: torch's ``reconfigure``, from version 2.14 on.

Each ``reconfigure`` ends ddl's job in this process, and starts another job with those ranks whose handles are given.
Nothing of the old job is needed for that, so a rank that has died cannot hold it up.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ddl_torch.distributed.group import DdlProcessGroup
from ddl_torch.distributed.meeting import this_host
from ddl_torch.distributed.store import DdlStore
from ddl_torch.distributed.uncompiled import uncompiled
from ddl_torch.distributed.work import DoneWork
from ddlcore.api import global_process_set, is_initialized
from ddlcore.api.framework_groups import init_as, is_launched, leave_launch
from ddlcore.contracts import RankInfo
from ddlcore.errors import InvalidArgument, NotInitialized

_PATIENCE_S = 1.0  # for a collective in flight when the group is reconfigured: a peer may be about to end it
_WITH_PEERS = {"_set", "_unnamed", "_own_store", "_p2p"}  # the attributes that a group without peers does not have


@dataclass(frozen=True)
class PeerHandle:
    """What a process tells its peers about itself. No other group has the same ``word``."""

    word: str
    host: str

    @classmethod
    def read(cls, text: str) -> PeerHandle:
        """Return the handle that ``text`` is. Raises InvalidArgument if it is none."""
        try:
            backend, word, host = json.loads(text)
        except (ValueError, TypeError):
            backend = None
        if backend != "ddl":
            raise InvalidArgument(
                f"reconfigure: {text[:100]!r} is not a handle of the backend ddl; "
                "give what get_reconfigure_handle() returns on each of the ranks"
            )
        return cls(str(word), str(host))

    def text(self) -> str:
        """Return what ``read`` makes an equal handle of."""
        return json.dumps(["ddl", self.word, self.host])


@uncompiled
class ReconfigurableGroup(DdlProcessGroup):
    """A group without peers until ``reconfigure`` gives it some. It is the same object afterwards, with another rank.

    ``rank``, ``size``: what ``init_process_group`` was given. They have no meaning for ddl: the handles decide.
    ``timeout``: how long ``reconfigure`` waits for the peers, and a collective for a rank, unless DDL_START_TIMEOUT_S
    and DDL_STALL_SHUTDOWN_S say otherwise. Raises InvalidArgument if ddl has a job in this process, or ``ddl run`` has
    started it.
    """

    supports_reconfigure = True

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        _refuse_other_jobs()
        super().__init__(store, rank, range(size), global_process_set, timeout, starts_job=False, own_store=None)
        self._handle = PeerHandle(secrets.token_hex(16), this_host())
        self._meetings: set[str] = set()  # that this process has gone to
        self._registry: Any = None  # of ddl's plugins, once they have been loaded
        self._lose_peers()

    def __getattr__(self, name: str) -> Any:
        if name in _WITH_PEERS:
            raise NotInitialized(
                "this process group has no peers: it was made with enable_reconfigure=True, and reconfigure() has not "
                "been called, has failed, or abort() was called since"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_reconfigure_handle(self) -> str:
        """Return the text by which peers know this group. It stays the same."""
        return self._handle.text()

    def reconfigure(self, opts: Any) -> Any:
        """Leave the present peers, and wait until all ranks of ``opts.handles`` have called this, with equal ``opts``.

        Present peers that do not answer hold this up for some seconds. What was made of this group, such as subgroups or
        DistributedDataParallel, has to be made anew: it knows the old ranks.

        A list of handles gives the ranks their numbers; in a set, their order is that of the texts. ``opts.uuid`` must
        be another one each time. Returns a work that is done.

        Raises InvalidArgument if this group's handle is not among the handles, if one is there twice or is none of ddl,
        if the uuid was there before, or if there are ``opts.hints``; then nothing has changed. Raises DeadlineExceeded
        if some ranks have not come within ``opts.timeout`` (None: the timeout of the group), and PeerLost if a rank
        dies. Then the group has no peers, and another ``reconfigure`` may follow.
        """
        if not self._starts_job:
            _refuse_other_jobs()
        texts = list(opts.handles) if isinstance(opts.handles, (list, tuple)) else sorted(opts.handles)
        members = [PeerHandle.read(text) for text in texts]
        meeting = self._meeting(opts.uuid, texts, members)
        if opts.hints:
            raise InvalidArgument(f"reconfigure: the backend ddl has no hints; these were given: {dict(opts.hints)}")
        leave_launch("called reconfigure() of torch.distributed", _PATIENCE_S)
        self._lose_peers()
        self._meetings.add(meeting)
        rank, size = members.index(self._handle), len(members)
        on_one_host = all(one.host == self._handle.host for one in members)
        patience = self._timeout if opts.timeout is None else opts.timeout
        try:
            self._starts_job = True
            self._registry = init_as(
                RankInfo(rank, size, local_size=size if on_one_host else None, launch=meeting),
                "torch.distributed",
                {
                    "DDL_START_TIMEOUT_S": f"{patience.total_seconds():g}",
                    "DDL_STALL_SHUTDOWN_S": f"{self._timeout.total_seconds():g}",
                    "DDL_TORCH_ENV": "0",  # RANK and WORLD_SIZE would be those of the first peers for ever
                },
                self._registry,
            )
            self._take_peers(rank, range(size), global_process_set, DdlStore("default group", self._timeout))
        except BaseException:
            self._end("could not reconfigure")
            raise
        return DoneWork()

    def abort(self) -> None:
        """Leave the peers at once. What is in flight fails on all ranks. Another ``reconfigure`` may follow."""
        self._end("called abort() of torch.distributed")

    def shutdown(self) -> None:
        """Leave the peers. Collectives that all of them have started run to their end first."""
        super().shutdown()
        self._lose_peers()

    def _meeting(self, uuid: int, texts: Sequence[str], members: Sequence[PeerHandle]) -> str:
        """Return the name of the meeting of ``members``, the same on all of them."""
        if self._handle not in members:
            raise InvalidArgument(
                f"reconfigure: the handle of this group is not among the {len(members)} handles; "
                "they must contain what get_reconfigure_handle() has returned here"
            )
        if len(set(members)) < len(members):
            raise InvalidArgument("reconfigure: a handle is there twice; give one for each rank")
        meeting = hashlib.sha256("\n".join([str(uuid), *texts]).encode()).hexdigest()[:32]
        if meeting in self._meetings:
            raise InvalidArgument(
                f"reconfigure: this group has been reconfigured by uuid {uuid} and the same handles before; "
                "give another uuid each time"
            )
        return meeting

    def _end(self, reason: str) -> None:
        """Leave the peers at once. If this raises ReentrantCall, nothing has changed."""
        if self._starts_job:
            leave_launch(reason, patience_s=0.0)
            self._starts_job = False
        self._lose_peers()

    def _lose_peers(self) -> None:
        for name in _WITH_PEERS & vars(self).keys():
            delattr(self, name)


def _refuse_other_jobs() -> None:
    if is_initialized() or is_launched():
        raise InvalidArgument(
            "enable_reconfigure=True: ddl has a job in this process already, or ddl's launcher has started it, and "
            "reconfigure() would end this job; leave ddl's init() and `ddl run` out, or use ddl_torch.elastic"
        )
