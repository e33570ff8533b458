"""Makes one process of an elastic job a member of one world after another, for ``ddlcore.api.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ddlcore.control.channel import Channel
from ddlcore.control.store import JobStore
from ddlcore.errors import DdlInternalError, NotInitialized
from ddlcore.job import VERSION, Job, log_at
from ddlcore.messages import PROTOCOL, Complete, Dismissed, Finished, Refused, Register, World

_SLICE_S = 0.1  # longest delay until a wait notices Ctrl-C


class ElasticMember:
    """One process of an elastic job, from its ``init`` to its end. Only the thread that trains uses this object."""

    def __init__(
        self, place: int, network: Callable[[], tuple[Channel, JobStore]], job_of: Callable[[World], Job]
    ) -> None:
        """Create the member. ``place``: the number of this process in the launch.

        ``network`` connects to the coordinator and returns the channel and the store. ``job_of`` returns the job of
        this process in a given world, not started yet.
        """
        self._place = place
        self._network = network
        self._job_of = job_of
        self.dismissed = ""  # why this process must leave the training; "": it need not leave
        self.world: World | None = None  # the newest world of which this process was a member

    def next_job(self, steps: int, reason: str) -> Job | None:
        """Wait until this process is a member of the next world. Return its job in that world, not started yet.

        ``steps``: the number of optimizer steps that the state of this process contains; -1: the process has no state
        yet. ``reason``: why the process has left the last world, in words for the user; "" if nothing has failed and
        all ranks left that world together at the same call of ``commit()``. Returns None if the training has ended, or
        if this process must leave the training. If it must leave, the attribute ``dismissed`` contains the reason.
        Raises DdlInternalError if the job cannot go on.
        """
        generation = 0 if self.world is None else self.world.generation
        channel, store = self._network()
        try:
            channel.send(Register(PROTOCOL, VERSION, generation, steps, reason))
            while True:
                for message in channel.receive(_SLICE_S):
                    if isinstance(message, World):
                        self.world = message
                        return self._job_of(message)
                    if isinstance(message, Complete):
                        return None
                    if isinstance(message, Dismissed):
                        self.dismissed = message.reason
                        return None
                    if isinstance(message, Refused):
                        raise DdlInternalError(f"elastic: {message.text}")
        finally:
            channel.close()
            store.close()

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
        self.overlaps = self.settings.overlaps(self.cross_size)
        self.device_label = lambda device, sparse=False, stage_on_host=False: ""  # the first world gives labels

    def members(self, set_id: int) -> tuple[int, ...] | None:
        """Return all ranks of the launch if ``set_id`` is 0, the global process set; None for any other id."""
        return tuple(range(self.size)) if set_id == 0 else None

    def disown(self) -> None:
        """Make the job unusable in a forked process, such as a worker of a DataLoader.

        This job has no connections or threads, so nothing needs to be closed.
        """
        self.forked = True

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        # An optimizer keeps references to methods of the job long before it calls them.
        if name in ("start_request", "start_all", "start_and_wait", "name_entries"):
            return _too_soon
        _too_soon()


def _too_soon(*_args: object, **_kwargs: object) -> NoReturn:
    raise NotInitialized(
        "this job is elastic (ddl run --min-np): its ranks meet where the function that elastic.run decorates begins, "
        "and not before. Move collectives, such as broadcast_parameters, into that function, or leave them out: the "
        "elastic state copies the model, the optimizer and its attributes to all ranks"
    )
