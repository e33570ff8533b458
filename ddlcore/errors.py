"""Define all error classes of ddl.

A wrong argument raises ``InvalidArgument`` at the call: a ``ValueError`` that is also a ``RuntimeError``. Errors of a
running job are derived from ``DdlInternalError``, which is called ``HorovodInternalError`` in Horovod's scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "Closed",
    "DdlInternalError",
    "DeadlineExceeded",
    "DeviceError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "IncompleteGradients",
    "InvalidArgument",
    "MismatchError",
    "NotInitialized",
    "ObjectDigestError",
    "PeerLost",
    "PluginError",
    "RankFailed",
    "ReducedTwice",
    "ReentrantCall",
    "ReplicasDiffer",
    "TransportError",
]


class DdlInternalError(RuntimeError):
    """The error that the job cannot continue; the base class of all errors of a running job."""


HorovodInternalError = DdlInternalError


class PeerLost(DdlInternalError):
    """The error that another rank has died, has raised an exception, or has left while it was still needed.

    ``ranks`` are the world ranks that were lost. ``reason`` says why the first of them ended, as far as it is known,
    and ``during`` names the operation that failed ("" if unknown).
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
    """The error that this rank itself ended the job (``shutdown``) while the operation was in flight."""


class MismatchError(DdlInternalError):
    """The error that the ranks requested different operations under one name.

    The message contains a table of what each rank requested. ``kinds`` are the different operations ("allreduce",
    "allgather"). ``parts`` are the different texts that callers passed as ``part_of`` ("" if a caller passed none).
    """

    def __init__(self, text: str, kinds: Iterable[str] = (), parts: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.kinds = frozenset(kinds)
        self.parts = frozenset(parts)


class IncompleteGradients(RuntimeError):
    """Raised if a backward pass has ended with an exception. Its gradients must not be used; compute them again."""


class ReplicasDiffer(DdlInternalError):
    """Raised if the ranks' copies of the parameters are not equal, even if only one bit differs.

    The message says where they differ, and what to do. ``tensor`` is the first parameter that differs, in the order of
    the parameters ("" if the ranks do not have the same parameters). ``groups`` are groups of world ranks whose copies
    are equal, the largest group first. ``step`` counts the steps of the optimizer; ``agreed_step`` is the last step
    after which all copies were equal (-1: none). Both are -1 for ``verify``, which does not belong to a step.
    ``distances`` holds, by rank, the largest absolute difference from the copy of the lowest rank, where it is known.
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
    """The error that a wait has reached its deadline; the message says for what or for which ranks it waited."""


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by ``commit()`` of an elastic state, on all ranks at the same call, when ranks join the training.

    ``elastic.run`` catches it. A function that it decorates must let it pass.
    """


class TransportError(DdlInternalError):
    """The error that a transport failed, where it is not known whether a rank has died. Its cause is chained."""


class DeviceError(DdlInternalError):
    """The error that an accelerator, its driver or its memory failed.

    The message says what to do, and the cause is chained.
    """


class ObjectDigestError(DdlInternalError):
    """The error that an object's bytes do not have the digest that the sending rank announced.

    They were not unpickled.
    """


class InvalidArgument(ValueError, RuntimeError):
    """The error that an argument of a call is wrong on this rank: nothing was sent, and the job goes on.

    It is also a RuntimeError, because Horovod's scripts catch that. It is not a DdlInternalError: after such an error a
    script may restart the job, and here the same call would fail again.
    """

    # A framework that traces the user's code catches an error and raises it again with the place in the code added. It
    # keeps the class of the error only if that class has the constructor of Exception.
    __init__ = Exception.__init__


class ReducedTwice(InvalidArgument):
    """The error that another library would reduce the same gradients over the same ranks as ddl.

    This is the case if a model is wrapped in DistributedDataParallel, and its optimizer in DistributedOptimizer.
    """


class NotInitialized(ValueError):
    """The error that a function of ddl was called before ``init()`` or after ``shutdown()``."""


class ReentrantCall(RuntimeError):
    """The error that a signal handler or a finalizer called ddl while its thread was executing a call of ddl.

    The refused call had no effect; the job goes on.
    """


class PluginError(RuntimeError):
    """The error that a plugin cannot be used; the message names its distribution and says what to do."""


class RankFailed(RuntimeError):
    """The error that a rank of ``ddlcore.run`` raised an exception or died.

    ``rank`` is the rank that failed first; if it raised an exception, that exception is the cause.
    """

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        self.text = text
        super().__init__(text)

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, str]]:
        return type(self), (self.rank, self.text)
