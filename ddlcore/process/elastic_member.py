"""Makes one process of an elastic job a member of one world after another, for ``ddlcore.api.elastic``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, cast

from ddlcore.control.channel import Channel
from ddlcore.control.store import JobStore
from ddlcore.errors import DdlInternalError, NotInitialized
from ddlcore.messages.elastic import Ballot, Complete, CoordinatorLost, Dismissed, Finished, NextWorld, Register
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_rank import Refused
from ddlcore.process.job import Job, log_at
from ddlcore.version import VERSION

log = logging.getLogger("ddl")
_SLICE_S = 0.1  # delay at most until a wait notices Ctrl-C


class _CoordinatorLost(Exception):
    """Raised when the coordinator with which a process has registered is lost; the message says why."""


class ElasticMember:
    """One process of an elastic job, from its ``init`` to its end. Only the thread that trains uses this object."""

    def __init__(self, network: Callable[[], tuple[Channel, JobStore]], job_of: Callable[[NextWorld], Job]) -> None:
        """Create the member.

        ``network`` connects to the coordinator and returns the channel and the store. ``job_of`` returns the job of
        this process in a given world, not started yet.
        """
        self._network = network
        self._job_of = job_of
        self._last: Job | None = None  # the job of this process in its newest world
        self.dismissed = ""  # why this process is to leave the training; "": it is not
        self.world: NextWorld | None = None  # the newest world of which this process was a member
        self._effective: Ballot = (0, 0)  # the newest world of which it has seen that all members took over the state

    def next_job(self, steps: int, reason: str, again: int = 0) -> Job | None:
        """Wait until this process is a member of the next world, and return its job there, which is not started yet.

        ``steps`` is the number of optimizer steps that the state of this process contains; -1 means that it has no
        state yet. ``reason`` says why the process has left the last world, in words for the user; it is empty if all
        ranks left that world together at the same call of ``commit()``, so that nothing has failed. ``again`` is the number
        of steps after ``steps`` that this process has computed, wholly or in part, and has given up. Returns None if the
        training has ended. Raises DdlInternalError if the job cannot go on.
        """
        while True:
            try:
                return self._register(steps, reason, again)
            except _CoordinatorLost as lost:
                log.info("elastic: %s; this process registers with its successor", lost)
                reason = reason or str(lost)

    def _register(self, steps: int, reason: str, again: int) -> Job | None:
        """Register with the present coordinator; see ``next_job``. Raises _CoordinatorLost if it is lost meanwhile."""
        generation = 0 if self.world is None else self.world.generation
        channel, store = self._network()
        try:
            channel.send(Register(PROTOCOL, VERSION, generation, steps, reason, again, self._effective))
            while True:
                for message in channel.receive(_SLICE_S):
                    if isinstance(message, NextWorld):
                        self.world = message
                        return self._job_in(message)
                    if isinstance(message, Complete):
                        return None
                    if isinstance(message, Dismissed):
                        self.dismissed = message.reason
                        return None
                    if isinstance(message, CoordinatorLost):
                        raise _CoordinatorLost(message.reason)
                    if isinstance(message, Refused):
                        raise DdlInternalError(f"elastic: {message.text}")
        finally:
            channel.close()
            store.close()

    def _job_in(self, world: NextWorld) -> Job:
        job = self._job_of(world)
        if self._last is not None:
            job.go_on_from(self._last)
        self._last = job
        return job

    def began(self) -> None:
        """Record that all members of the present world have taken over the state, so each of them is in this world."""
        assert self.world is not None
        self._effective = self.world.ballot

    def finished(self, job: Job) -> None:
        """Tell the coordinator, by a message of ``job``, that all members have reached the end of the training."""
        assert self.world is not None
        job.tell(Finished(self.world.generation))


class JobBeforeWorld(Job):
    """The job of a process of an elastic job before the process is a member of a world.

    This job has a rank and a size, but no collectives. If a process is started while other processes train, the new
    process must not wait in ``init``, and the other processes must not wait until the new one has loaded its libraries
    and its data. So a process does not join a world in ``init``. It joins a world when it calls the function that
    ``elastic.run`` decorates.
    """

    def start(self) -> None:
        """Start this job without any connection to other ranks."""
        log_at(self.settings.text("log_level"))
        self.overlaps = self.settings.overlaps(self.placement.cross_size)
        self._parts = self.sets = self.tensor_queue = self.lookout = self.waiter = cast(Any, _NoParts())
        self.context = _too_soon
        # An optimizer keeps references to these long before it calls them.
        self.start_request = self.start_all = self.start_and_wait = self.name_entries = self.check_stall = _too_soon
        self.device_label = lambda device, sparse=False, stage_on_host=False: ""  # the first world gives labels
        everyone = tuple(range(self.size))
        self.members = lambda set_id: everyone if set_id == 0 else None

    def disown(self) -> None:
        """Make the job unusable in a forked process, such as a worker of a DataLoader.

        This job has no connections or threads, so nothing needs to be closed.
        """
        self.forked = True


class _NoParts:
    """Stands for the parts of a job that is in no world yet. Every use of it raises NotInitialized."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _too_soon()


def _too_soon(*_args: object, **_kwargs: object) -> NoReturn:
    raise NotInitialized(
        "this job is elastic (ddl run --min-np): its ranks meet where the function that elastic.run decorates begins, "
        "and not before. Move collectives, such as broadcast_parameters, into that function, or leave them out: the "
        "elastic state copies the model, the optimizer and its attributes to all ranks"
    )
