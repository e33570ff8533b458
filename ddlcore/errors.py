"""Every error that ddl raises by name: we closed it, they are gone, we disagree, it took too long.

Wrong arguments are ``InvalidArgument`` at the call, a ``ValueError`` that is a ``RuntimeError`` too; what happens to a
running job derives from ``DdlInternalError``, which Horovod's scripts know as ``HorovodInternalError``.
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
    """The job cannot go on as asked; the base of all that a running job raises."""


HorovodInternalError = DdlInternalError


class PeerLost(DdlInternalError):
    """Another rank died, raised, or left while it was still needed.

    ``ranks`` are the world ranks that are gone, ``reason`` says what is known of the end of the first.
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
    """This rank itself ended the job (``shutdown``) while the operation was under way."""


class MismatchError(DdlInternalError):
    """The ranks asked for different things under one name; the message holds a table of who asked what."""


class IncompleteGradients(RuntimeError):
    """A backward pass ended by an exception, so that its gradients cannot be stepped on; compute them again."""


class ReplicasDiffer(DdlInternalError):
    """The ranks' copies of the parameters are not the same to the last bit; the message says where, and what to do.

    ``tensor`` is the first that differs, in the order of the parameters ("" where the ranks do not have the same
    tensors); ``groups`` are the world ranks that agree with each other, the largest group first. ``step`` counts the
    optimizer's steps, ``agreed_step`` is the last at which all were found equal (-1: at none); both are -1 for
    ``verify``, which knows no steps. ``distances`` are the largest absolute differences from the lowest rank, by
    rank, where they are known.
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
    """A wait that has a deadline reached it; the message names who was waited for."""


class TransportError(DdlInternalError):
    """The data path failed in a way that names no dead rank; the cause is chained."""


class DeviceError(DdlInternalError):
    """An accelerator, its driver or its memory failed; the message says what to do, the cause is chained."""


class ObjectDigestError(DdlInternalError):
    """The bytes of an object are not those that its owner announced; they were not unpickled."""


class InvalidArgument(ValueError, RuntimeError):
    """An argument of a collective is wrong, on this rank: nothing was sent, and the job goes on.

    A RuntimeError too, which scripts that were written for Horovod catch. No DdlInternalError: the call would be
    as wrong again, so that what restarts a job after such an error must not meet it.
    """

    # Frameworks that trace the user's code raise an error of it anew, with its place there, and keep its class where
    # its constructor is Exception's own.
    __init__ = Exception.__init__


class NotInitialized(ValueError):
    """A verb was called before ``init()`` or after ``shutdown()``."""


class ReentrantCall(RuntimeError):
    """A signal handler or a finalizer called ddl while its thread was inside ddl; nothing has changed, the job goes on."""


class PluginError(RuntimeError):
    """A plugin cannot be used; the message names its distribution and says what to do."""


class RankFailed(RuntimeError):
    """A rank of ``ddlcore.run`` raised or died. ``rank`` is the first that did; what it raised is the cause."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        self.text = text
        super().__init__(text)

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, str]]:
        return type(self), (self.rank, self.text)
