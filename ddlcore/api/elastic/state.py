"""The state that an elastic training keeps from one world to the next. This module is independent of frameworks."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from ddlcore.api.elastic.sampler import EpochSampler
from ddlcore.api.objects import allgather_object, broadcast_object
from ddlcore.api.world import current_job, elastic_member, rank, size
from ddlcore.errors import HostsUpdatedInterrupt, InvalidArgument

__all__ = ["ObjectState", "State", "StepState"]


class State(ABC):
    """The base class of elastic states: the values that an elastic training keeps when its world changes.

    ``ObjectState`` and the states of frameworks are subclasses. A subclass defines ``save``, ``restore`` and ``sync``.
    When a world begins, all ranks copy the state of the rank with the highest ``steps``. Only the thread that trains
    may use a state.
    """

    def __init__(self) -> None:
        self.steps = 0  # how many steps the state contains
        self.root = 0  # whose state ``sync`` copies: a rank of the present world
        self.is_between_steps = False  # whether a failure was noticed by ``commit``: no step was interrupted
        self.is_torn = False  # whether an error has ended the training in the middle of a step
        self._entered = False  # whether the state is that of a world; before, it must not count as one
        self._callbacks: list[Callable[..., object]] = []

    @property
    def registered_steps(self) -> int:
        """The number of steps that this process reports when it registers for the next world; -1: no state yet."""
        return self.steps if self._entered else -1

    def register_reset_callbacks(self, callbacks: Iterable[Callable[..., object]]) -> None:
        """Register functions that are called each time the ranks have formed another world, before ``sync``.

        A callback that accepts two arguments gets the old and the new number of ranks. Any other callback is called
        without arguments.
        """
        self._callbacks += callbacks

    def commit(self) -> None:
        """Save the present values of the attributes for ``restore``, and let waiting ranks join the training.

        All ranks must call this equally often, for example after each step. If ranks join, HostsUpdatedInterrupt is
        raised on all ranks at the same call, and ``elastic.run`` calls the training function again.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let waiting ranks join the training, as ``commit`` does, but save the values only if ranks join.

        Raises HostsUpdatedInterrupt on all ranks at the same call if ranks join. Raises the error of the job if the job
        has failed, such as PeerLost if a rank of this world is lost.
        """
        if elastic_member() is None:
            return
        job = current_job()
        failure = job.failed_with()
        if failure is not None:  # a loop without collectives would not notice it
            self.is_between_steps = True
            raise failure
        if job.commit_calls.called():
            self.save()  # all ranks are at the same call, so they go on with the present values
            raise HostsUpdatedInterrupt("ranks join: all ranks leave this world at the same call")

    def enter(self, root: int, before: int) -> None:
        """Copy the state of rank ``root`` of the present world, which has just begun. ``elastic.run`` calls this.

        ``before``: the number of ranks of the previous world, or 0 if there was none. A process that was a member of an
        earlier world calls ``reset`` and the reset callbacks before it copies. A process that has just joined does not
        call them: it copies the state that the callbacks on ``root`` have already changed.
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
        """Prepare this state for another world, before the reset callbacks are called.

        The default does nothing. A subclass may override this method.
        """

    @abstractmethod
    def save(self) -> None:
        """Save the present values, so that ``restore`` can set them again."""

    @abstractmethod
    def restore(self) -> None:
        """Set the attributes to the values that the last ``save`` has saved.

        This is called after the ranks have left a world in the middle of a step.
        """

    @abstractmethod
    def sync(self) -> None:
        """Replace the whole state by the state of rank ``self.root``. If this fails, leave the state as it was."""


def _call_with_sizes(callback: Callable[..., object], before: int, after: int) -> None:
    try:
        inspect.signature(callback).bind(before, after)
    except (TypeError, ValueError):  # Horovod's callbacks take no arguments
        callback()
    else:
        callback(before, after)


class ObjectState(State):
    """An elastic state of plain Python values. Each keyword argument becomes an attribute of the state.

    ``commit`` saves a copy of each of these attributes. ``steps`` counts the calls of ``commit``. The values must be
    picklable, and are copied by ``copy.deepcopy``. ``bcast_object`` and ``get_rank`` are accepted for compatibility
    with Horovod and are not used.
    """

    # Whether a subclass copies the states of objects with ``state_dict`` and ``load_state_dict``, and not the objects.
    _handles_objects: ClassVar[bool] = False

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
        self._handled = {
            name: value
            for name, value in kwargs.items()
            if self._handles_objects and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        }
        self._names = tuple(name for name in kwargs if name not in self._handled)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved = self.values()

    if TYPE_CHECKING:  # the attributes are those that the user names

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def values(self) -> dict[str, Any]:
        """Return copies of the attributes that were passed as keyword arguments, by their names."""
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


class StepState(ObjectState):
    """The base class of the elastic states of frameworks, which keep everything in each step, or in each commit.

    If ``_by_step``, the subclass counts the applied steps, and keeps after each what the next one might change.
    """

    _by_step = False  # until all parts are known

    def _is_by_step(self, rollback: str, state: str) -> bool:
        """Return whether ``rollback`` is "step", not "commit". Others raise InvalidArgument about ``state``."""
        if rollback not in ("step", "commit"):
            raise InvalidArgument(f"{state}: rollback={rollback!r} is none of step, commit")
        return rollback == "step"

    @abstractmethod
    def _keep_all(self) -> None:
        """Store what ``restore`` needs in addition to the plain values."""

    def _head(self) -> Any:
        """Return what the root sends to all ranks besides the plain values, even if they have its steps."""

    @abstractmethod
    def _take_root(self, head: Any, is_behind: bool) -> None:
        """Take over ``head``, and the root's whole state if ``is_behind``: some rank lacks steps, the same on all ranks.

        This method must not wait for another rank after its first change.
        """

    def commit(self) -> None:
        if self._by_step:
            State.commit(self)
        else:
            super().commit()

    def save(self) -> None:
        super().save()
        if not self._by_step:
            self._keep_all()

    def reset(self) -> None:
        self._deal()

    def _deal(self) -> None:
        """Have all samplers deal their samples to the ranks of the present world."""
        for value in self._handled.values():
            if isinstance(value, EpochSampler):
                value.reset()

    def sync(self) -> None:
        head = self._head()  # on all ranks, because a ``state_dict`` of a user may wait for the other ranks
        mine = (self.steps, self._saved, head) if rank() == self.root else None
        steps, saved, head = broadcast_object(mine, self.root)
        self._take_root(head, any(allgather_object(not self._entered or self.steps != steps)))
        self._saved = saved
        ObjectState.restore(self)
        self.steps = steps
        self._deal()  # on the root, too, whose sampler may have been made before it was in any world
        self._keep_all()
