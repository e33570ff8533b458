"""Define all error classes of ddl.

A wrong argument raises ``InvalidArgument`` at the call: a ``ValueError`` that is also a ``RuntimeError``. Errors of a
running job are derived from ``DdlInternalError``. ``HorovodInternalError``, the name in Horovod's scripts, is the same
class.
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
    """Raised if the job cannot continue. This is the base class of all errors of a running job."""


HorovodInternalError = DdlInternalError


class PeerLost(DdlInternalError):
    """Raised if another rank has died, has raised an exception, or has left while this rank still needed it.

    ``ranks`` are the world ranks that were lost. ``reason`` says why the first of these ranks ended, as far as this is
    known. ``during`` names the operation that failed ("" if unknown).
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
    """Raised by an operation that was in flight when this rank itself left the job by ``shutdown``."""


class MismatchError(DdlInternalError):
    """Raised if the ranks requested different operations under one name.

    The message contains a table with the request of each rank. ``kinds`` are the names of the different operations,
    such as "allreduce" and "allgather". ``parts`` are the different texts that callers passed as ``part_of`` ("" if a
    caller passed none).
    """

    def __init__(self, text: str, kinds: Iterable[str] = (), parts: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.kinds = frozenset(kinds)
        self.parts = frozenset(parts)


class IncompleteGradients(RuntimeError):
    """Raised if a backward pass has ended with an exception.

    The gradients of this backward pass must not be used. The script must compute the gradients again.
    """


class ReplicasDiffer(DdlInternalError):
    """Raised if the ranks' copies of the parameters are not equal, even if only one bit differs.

    The message says where the copies differ, and what the user should do. ``tensor`` is the name of the first parameter
    that differs, in the order of the parameters ("" if the ranks do not have the same parameters). ``groups`` are
    groups of world ranks whose copies of this parameter are equal (or, if ``tensor`` is "", which have the same
    parameters), the largest group first. ``step`` is the number of the optimizer's step after which the copies
    differed. ``agreed_step`` is the last step after which all copies were equal (-1: none). Both are -1 if the function
    ``verify`` found the difference, because a call of ``verify`` does not belong to a step. ``distances`` maps a rank
    to the largest absolute difference between its copy of this parameter and the copy of the lowest rank. Ranks for
    which this difference is 0 or unknown are left out.
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
    """Raised if a wait has reached its deadline. The message names the event or the ranks that were waited for."""


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by ``commit()`` of an elastic state when ranks join the training.

    All ranks raise this exception at the same call of ``commit()``. ``elastic.run`` catches the exception. So a
    function that ``elastic.run`` decorates must not catch it.
    """


class TransportError(DdlInternalError):
    """Raised if a transport failed and it is not known whether a rank has died.

    The exception that the transport raised is chained as the cause of this error.
    """


class DeviceError(DdlInternalError):
    """Raised if an accelerator, its driver or its memory failed.

    The message says what to do. The original exception is chained as the cause of this error.
    """


class ObjectDigestError(DdlInternalError):
    """Raised if the bytes of a received object do not have the digest that the sending rank announced.

    The bytes were not unpickled.
    """


class InvalidArgument(ValueError, RuntimeError):
    """Raised if an argument of a call is wrong on this rank. Nothing was sent, and the job goes on.

    This class is also a RuntimeError, because Horovod's scripts catch RuntimeError. This class is not a
    DdlInternalError: a script may restart the job after a DdlInternalError, but a call with a wrong argument would fail
    again after a restart.
    """

    # A framework that traces the user's code catches an error, adds the place in the code, and raises the error again.
    # The framework keeps the class of the error only if that class has the constructor of Exception.
    __init__ = Exception.__init__


class ReducedTwice(InvalidArgument):
    """Raised if another library would reduce the same gradients over the same ranks as ddl.

    This happens if the model is wrapped in DistributedDataParallel and the model's optimizer is wrapped in
    DistributedOptimizer.
    """


class NotInitialized(ValueError):
    """Raised if a function of ddl was called before ``init()`` or after ``shutdown()``."""


class ReentrantCall(RuntimeError):
    """Raised if a signal handler or a finalizer called ddl in a thread that was just executing another call of ddl.

    The call of the signal handler or finalizer had no effect. The job goes on.
    """


class PluginError(RuntimeError):
    """Raised if a plugin cannot be used. The message names the plugin's distribution and says what to do."""


class RankFailed(RuntimeError):
    """Raised if a rank of ``ddlcore.run`` raised an exception or died.

    ``rank`` is the rank that failed first. If that rank raised an exception, the exception is chained as the cause.
    """

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        self.text = text
        super().__init__(text)

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, str]]:
        return type(self), (self.rank, self.text)
