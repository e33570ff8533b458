"""Define every error that ddl raises by name.

A wrong argument raises ``InvalidArgument`` at the call: a ``ValueError`` that is also a ``RuntimeError``. Errors of a
running job derive from ``DdlInternalError``, which Horovod's scripts know as ``HorovodInternalError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "Closed",
    "DdlInternalError",
    "DeadlineExceeded",
    "DeviceError",
    "HorovodInternalError",
    "IncompleteGradients",
    "InvalidArgument",
    "MismatchError",
    "NotInitialized",
    "ObjectDigestError",
    "PeerLost",
    "PluginError",
    "RankFailed",
    "ReentrantCall",
    "ReplicasDiffer",
    "TransportError",
]


class DdlInternalError(RuntimeError):
    """The job cannot go on as asked; the base class of all errors of a running job."""


HorovodInternalError = DdlInternalError


class PeerLost(DdlInternalError):
    """Another rank died, raised an exception, or left while it was still needed.

    ``ranks`` are the world ranks that are gone. ``reason`` says what is known about the end of the first of them, and
    ``during`` is the operation that failed ("" if unknown).
    """

    def __init__(self, ranks: Iterable[int], reason: str, during: str = "") -> None:
        self.ranks = tuple(ranks)
        self.reason = reason
        self.during = during
        who = "rank" if len(self.ranks) == 1 else "ranks"
        at = f" during {during}" if during else ""
        super().__init__(f"{who} {', '.join(map(str, self.ranks))} lost{at}: {reason}")

    @property
    def rank(self) -> int:
        """The first rank that was lost."""
        return self.ranks[0]

    def __reduce__(self) -> tuple[type[PeerLost], tuple[tuple[int, ...], str, str]]:
        return type(self), (self.ranks, self.reason, self.during)


class Closed(DdlInternalError):
    """This rank itself ended the job (``shutdown``) while the operation was in flight."""


class MismatchError(DdlInternalError):
    """The ranks asked for different things under one name; the message holds a table of what each rank asked.

    ``kinds`` are the operations that they asked for ("allreduce", "allgather"), ``parts`` what the callers said that
    their tensors are part of ("" if a caller said nothing).
    """

    def __init__(self, text: str, kinds: Iterable[str] = (), parts: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.kinds = frozenset(kinds)
        self.parts = frozenset(parts)


class IncompleteGradients(RuntimeError):
    """A backward pass ended with an exception, so its gradients must not be used for a step; compute them again."""


class ReplicasDiffer(DdlInternalError):
    """The ranks' copies of the parameters differ in at least one bit; the message says where, and what to do.

    ``tensor`` is the first parameter that differs, in the order of the parameters ("" if the ranks do not have the same
    parameters). ``groups`` are groups of world ranks whose copies agree, the largest group first. ``step`` counts the
    steps of the optimizer; ``agreed_step`` is the last step at which all copies were found equal (-1: none). Both are
    -1 for ``verify``, which knows no steps. ``distances`` holds by rank the largest absolute difference from the lowest
    rank's copy, where it is known.
    """

    def __init__(
        self,
        text: str,
        tensor: str = "",
        groups: Iterable[Iterable[int]] = (),
        step: int = -1,
        agreed_step: int = -1,
        distances: Mapping[int, float] | None = None,
    ) -> None:
        self.text = text
        self.tensor = tensor
        self.groups = tuple(tuple(group) for group in groups)
        self.step = step
        self.agreed_step = agreed_step
        self.distances = dict(distances or {})
        super().__init__(text)

    def __reduce__(self) -> tuple[type[ReplicasDiffer], tuple[object, ...]]:
        return type(self), (self.text, self.tensor, self.groups, self.step, self.agreed_step, self.distances)


class DeadlineExceeded(DdlInternalError, TimeoutError):
    """A wait with a deadline has reached it; the message names what or which ranks it waited for."""


class TransportError(DdlInternalError):
    """The data path failed in a way that does not identify a dead rank; the cause is chained."""


class DeviceError(DdlInternalError):
    """An accelerator, its driver or its memory failed; the message says what to do, and the cause is chained."""


class ObjectDigestError(DdlInternalError):
    """The bytes of an object do not match the digest that the sending rank announced, so they were not unpickled."""


class InvalidArgument(ValueError, RuntimeError):
    """An argument of a collective is wrong on this rank: nothing was sent, and the job goes on.

    It is also a RuntimeError, because scripts for Horovod catch that. It is not a DdlInternalError: the same call would
    fail again, so code that restarts a job after a DdlInternalError must not catch it.
    """

    # Frameworks that trace the user's code raise its errors again, with the place in that code added. They keep the
    # class of the error only if its constructor is Exception's own.
    __init__ = Exception.__init__


class NotInitialized(ValueError):
    """A function of ddl was called before ``init()`` or after ``shutdown()``."""


class ReentrantCall(RuntimeError):
    """A signal handler or a finalizer called ddl while its thread was inside ddl.

    The call had no effect; the job goes on.
    """


class PluginError(RuntimeError):
    """A plugin cannot be used; the message names its distribution and says what to do."""


class RankFailed(RuntimeError):
    """A rank of ``ddlcore.run`` raised or died.

    ``rank`` is the first that did; the exception that it raised is the cause.
    """

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        self.text = text
        super().__init__(text)

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, str]]:
        return type(self), (self.rank, self.text)
