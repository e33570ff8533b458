"""Process sets: groups of ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Sequence

from ddlcore.api.world import current_job, is_initialized
from ddlcore.contracts.framework import JobService
from ddlcore.errors import InvalidArgument
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.process.job import Job
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.request import ANONYMOUS, Entry
from ddlcore.types import Kind

__all__ = [
    "ProcessSet",
    "add_process_set",
    "change_sets",
    "global_process_set",
    "process_sets",
    "remove_process_set",
]


class ProcessSet:
    """Some ranks of the world, which run collectives among themselves.

    ``ranks`` are ranks of the world, in rising order. ``process_set_id`` is None until the set is registered.
    """

    process_set_id: int | None

    def __init__(self, ranks: Sequence[int]) -> None:
        try:
            given = [int(rank) for rank in ranks]
        except TypeError:
            raise InvalidArgument(f"ProcessSet takes a sequence of ranks, not {type(ranks).__name__}") from None
        if len(set(given)) != len(given):
            raise InvalidArgument(f"process set with duplicate rank in {given}")
        self.ranks = sorted(given)
        self.process_set_id = None

    def resolve(self, job: JobService) -> tuple[int, tuple[int, ...]]:
        """Return the id of this set and its members, as ranks of the world.

        Raises ValueError if this set is not registered in ``job``, or if this rank is not a member.
        """
        set_id = self.process_set_id
        members = None if set_id is None else job.members(set_id)
        if set_id is None or members is None:
            raise InvalidArgument(f"{self} is not registered in this job; pass it to init() or add_process_set() first")
        if job.rank not in members:
            raise InvalidArgument(f"rank {job.rank} is not a member of {self}; only members may call")
        return set_id, members

    def size(self) -> int | None:
        """Return the number of members, or None if this set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the position of this process among the members, or None if this set is not registered.

        Raises ValueError if this process is not a member.
        """
        if self.process_set_id is None:
            return None
        return self.resolve(current_job())[1].index(current_job().rank)

    def included(self) -> bool | None:
        """Return whether this process is a member, or None if this set is not registered."""
        return None if self.process_set_id is None else current_job().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """The process set that contains all ranks of the current world."""

    def __init__(self) -> None:
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]  # changes with the current world
        return list(range(current_job().size)) if is_initialized() else []

    def size(self) -> int:
        return current_job().size


global_process_set: ProcessSet = _GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, and return it as a ProcessSet.

    Every rank of the world must call this, including ranks that are not members. The call returns when all ranks have
    called it. ``process_set``: a ProcessSet, or the ranks of its members. Raises ValueError if a set with the same
    members is registered already or if a rank does not exist. Raises MismatchError if the ranks pass different members.
    """
    job = current_job()
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if one.process_set_id is not None and job.sets.members(one.process_set_id) is not None:
        raise InvalidArgument(f"{one} is registered already")
    wrong = [member for member in one.ranks if not 0 <= member < job.size]
    if wrong or not one.ranks:
        raise InvalidArgument(
            f"process set with invalid rank: {wrong or 'it is empty'}; the world has ranks 0 to {job.size - 1}"
        )
    if one.ranks in job.sets.ids_and_ranks().values():
        raise InvalidArgument(f"a process set with ranks {one.ranks} exists already; use that one")
    spec = Spec(Kind.ADD_SET, ranks=tuple(one.ranks))
    one.process_set_id = change_sets(job, spec)
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set from the job. Every rank of the world must call this.

    Return True if the set was removed. Return False if the set is the global process set or is not registered.
    """
    job = current_job()
    set_id = process_set.process_set_id
    if set_id is None or set_id == 0 or job.sets.members(set_id) is None:
        return False
    change_sets(job, Spec(Kind.REMOVE_SET, ranks=(set_id,)))
    process_set.process_set_id = None
    return True


def change_sets(job: Job, spec: Spec, name: str = ANONYMOUS) -> int:
    """Add or remove a process set as ``spec`` says, by a call with ``name``. Return the number of the set."""
    handle = Handle(job.waiter, 1, lambda outcomes: -1 if outcomes[0] is None else outcomes[0].result)
    job.submit([Entry(handle, 0, 0, name, spec, encode(spec))])
    return int(handle.wait())


def process_sets() -> dict[int, list[int]]:
    """Return the registered process sets as a dict that maps the id of a set to the ranks of its members."""
    return current_job().sets.ids_and_ranks()
