"""The state that an elastic training carries from world to world, without anything of a framework."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ddlcore.api.objects import broadcast_object
from ddlcore.api.world import current_job, elastic_member, size
from ddlcore.errors import HostsUpdatedInterrupt, InvalidArgument

__all__ = ["ObjectState", "State"]


class State(ABC):
    """What an elastic training keeps when its world changes.

    ``ObjectState`` and the states of frameworks derive from it.

    A subclass defines ``save``, ``restore`` and ``sync``. When a world begins, all ranks take over the state of the
    rank whose ``steps`` is the highest. Only the thread that trains may use a state.
    """

    def __init__(self) -> None:
        self.steps = 0  # how many steps the state contains
        self.root = 0  # whose state ``sync`` copies: a rank of the present world
        self.is_between_steps = False  # whether a failure was noticed by ``commit``: no step was interrupted
        self._entered = False  # whether the state is that of a world; before, it must not count as one
        self._callbacks: list[Callable[..., object]] = []

    @property
    def registered_steps(self) -> int:
        """The count of steps with which this process registers for the next world: -1 if it has no state yet."""
        return self.steps if self._entered else -1

    def register_reset_callbacks(self, callbacks: Iterable[Callable[..., object]]) -> None:
        """Call ``callbacks`` each time that the ranks have formed another world, before ``sync``.

        A callback that takes two arguments gets the old and the new number of ranks; others get none.
        """
        self._callbacks += callbacks

    def commit(self) -> None:
        """Keep the present values of the attributes, and let ranks join that wait for it.

        All ranks must call this equally often, for example after each step. Raises HostsUpdatedInterrupt, on all ranks
        at the same call, if ranks join; ``elastic.run`` then calls the training function again.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let ranks join that wait for it, as ``commit`` does, but keep nothing unless they do.

        Raises PeerLost if a rank of this world is known to be lost.
        """
        if elastic_member() is None:
            return
        job = current_job()
        failure = job.failed_with()
        if failure is not None:  # a loop without collectives would not notice it
            self.is_between_steps = True
            raise failure
        if job.commit_calls.next_is_agreed():
            self.save()  # all ranks are at the same place, so they go on with what is there now
            raise HostsUpdatedInterrupt("ranks join: all ranks leave this world at the same call")

    def enter(self, root: int, before: int) -> None:
        """Take over the state of rank ``root`` of the present world, which has begun. ``elastic.run`` calls this.

        ``before`` is the number of ranks of the world before, or 0 if there was none. The reset callbacks are called in
        a process that was in that world; a process that joins takes over what they have changed in the state.
        """
        if before and self._entered:
            self.reset()
            for callback in self._callbacks:
                _call_with_sizes(callback, before, size())
        self.root = root
        self.is_between_steps = False
        self.sync()
        self._entered = True

    def reset(self) -> None:
        """Prepare for another world, before the reset callbacks are called. A subclass may define it."""

    @abstractmethod
    def save(self) -> None:
        """Keep the present values, for ``restore``."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the kept values, because the ranks have left a world in the middle of a step."""

    @abstractmethod
    def sync(self) -> None:
        """Take over the whole state of rank ``root``, or nothing of it if that fails: never only a part."""


def _call_with_sizes(callback: Callable[..., object], before: int, after: int) -> None:
    try:
        inspect.signature(callback).bind(before, after)
    except (TypeError, ValueError):  # Horovod's callbacks take no arguments
        callback()
    else:
        callback(before, after)


class ObjectState(State):
    """A state of plain Python values: each keyword becomes an attribute, and ``commit`` keeps a copy of it.

    ``steps`` counts the calls of ``commit``. Values must be picklable, and are copied by ``copy.deepcopy``.
    ``bcast_object`` and ``get_rank`` are accepted for compatibility with Horovod and are not used.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        taken = sorted(name for name in kwargs if hasattr(type(self), name) or name in self.__dict__)
        if taken:
            raise InvalidArgument(f"{type(self).__name__}: {', '.join(taken)} is a name of the state itself")
        self._names = tuple(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved = self.values()

    if TYPE_CHECKING:  # the attributes are those that the user names

        def __getattr__(self, name: str) -> Any: ...

    def values(self) -> dict[str, Any]:
        """Return copies of the attributes that were given as keywords."""
        return {name: _copied(name, getattr(self, name)) for name in self._names}

    def commit(self) -> None:
        self.steps += 1
        super().commit()

    def save(self) -> None:
        self._saved = self.values()

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, _copied(name, value))

    def sync(self) -> None:
        steps, saved = broadcast_object((self.steps, self._saved), self.root)
        self._saved = saved
        self.restore()
        self.steps = steps


def _copied(name: str, value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise InvalidArgument(
            f"the attribute {name} of the elastic state cannot be copied ({type(error).__name__}: {error}); keep only "
            "values in it that can be copied and pickled"
        ) from error
