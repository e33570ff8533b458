"""Process sets as in Horovod: made of ranks or of a communicator of MPI, and registered by ``init`` or later."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ddlcore.api import allgather_object, current_job, global_process_set, process_sets
from ddlcore.api import process_set as _core
from ddlcore.errors import InvalidArgument
from ddlcore.plug.aliases import ALIASES
from ddlcore.text.installing import pip_install


class _Any(type):
    """Makes every process set of ddl an instance, such as that of all ranks."""

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, _core.ProcessSet)


class ProcessSet(_core.ProcessSet, metaclass=_Any):
    """Some ranks of the world, which run collectives among themselves.

    ``ranks_or_comm``: the ranks, or a communicator of mpi4py, which is for ``init(process_sets=[…])`` alone. Then ``ranks``
    is None until ``init`` has asked the processes of the communicator. Raises ValueError for anything else.
    """

    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        try:
            iter(ranks_or_comm)
        except TypeError:
            _provider_of(ranks_or_comm)
            self.mpi_comm = ranks_or_comm
            self.ranks: Any = None
            self.process_set_id = None
        else:
            super().__init__(ranks_or_comm)

    def included(self) -> bool | None:
        """Return whether this process is a member, or None if this set has no ranks yet."""
        return None if self.ranks is None else current_job().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


class _EveryRank(type(global_process_set), ProcessSet):  # type: ignore[misc]  # mypy knows the base class only
    """The set of all ranks, which has ``mpi_comm``, too."""


global_process_set.__class__ = _EveryRank  # the object stays the same, because adapters compare with it


def add_process_set(process_set: Any) -> ProcessSet:
    """Register a process set, given as a ProcessSet or as ranks, and return it; see ``ddlcore.api.add_process_set``."""
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    return _core.add_process_set(one)  # type: ignore[return-value]  # the same object


def _provider_of(comm: Any) -> Any:
    """Return the class that knows communicators such as ``comm``. Raises ValueError if no plugin does."""
    from ddlcore.plug.settings import settings_of

    _, registry = settings_of(os.environ, warns=False)
    provider = registry.communicators_of(comm)
    if provider is not None:
        return registry.load(provider)
    library = type(comm).__module__.partition(".")[0]
    plugin = ALIASES["library of communicators"].get(library)
    advice = f"; for {library}'s: {registry.off(plugin) or pip_install(plugin)}" if plugin else ""
    raise InvalidArgument(f"ProcessSet takes ranks or a communicator of MPI, not {type(comm).__name__}{advice}")


def register(given: Sequence[Any], comm: Any) -> None:
    """Register the process sets ``given``, and tell each its number and ranks. Every rank of the world must call this.

    Ranks may pass different sets, as parts of a communicator that was split are: then each set is registered on all ranks. The
    sets of the first places come first. ``comm``: the communicator of the world if ``init`` was given one. Raises ValueError
    on the ranks that pass a set twice, or the set of all ranks; the other sets are registered, and the job goes on.
    """
    if comm is not None and not isinstance(comm, (list, tuple, range)):
        global_process_set.mpi_comm = comm  # type: ignore[attr-defined]
    job = current_job()
    sets = [one if isinstance(one, _core.ProcessSet) else ProcessSet(one) for one in given]
    for one in sets:
        own = getattr(one, "mpi_comm", None)
        if own is not None and not one.ranks:
            one.ranks = sorted(_provider_of(own)().ranks_of(own, job.rank, job.size))
    everyones: list[list[list[int]]] = allgather_object([list(one.ranks) for one in sets])
    for place in range(max(map(len, everyones))):
        for ranks in (theirs[place] for theirs in everyones if place < len(theirs)):
            if ranks not in map(list, process_sets().values()):
                add_process_set(ranks)
    numbers = {tuple(ranks): number for number, ranks in process_sets().items()}
    seen = {global_process_set.process_set_id}
    twice = []
    for number, one in enumerate(sets):
        one.process_set_id = numbers[tuple(one.ranks)]
        if one.process_set_id in seen:
            twice.append(f"process_sets entry number {number} is a duplicate: {one}")
            one.process_set_id = None
        seen.add(one.process_set_id)
    if twice:
        raise InvalidArgument(f"Horovod could not be initialized because {'; '.join(twice)}")
