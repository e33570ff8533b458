"""The contract of host discovery: which hosts an elastic job may use now."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ddlcore.contracts.launcher import HostSlots

__all__ = ["HostDiscovery"]


class HostDiscovery(ABC):
    """A source of hosts for an elastic job.

    It is built without arguments. One thread of the launcher uses it: it calls ``begin`` once, and then ``hosts`` again
    and again, about once a second, until the job has ended.
    """

    def begin(self, environ: Mapping[str, str], settings: Mapping[str, str | int | float | bool]) -> None:
        """Prepare. ``environ`` is the environment of the launching process, and ``settings`` are those of the job.

        Raises ValueError, in one line, if this discovery cannot be used here. Then nothing is started.
        """
        return

    @abstractmethod
    def hosts(self) -> Sequence[HostSlots]:
        """Return the hosts that the job may use now, each once, and how many ranks each takes.

        Hosts that are missing leave the job: their ranks leave the training at its next ``commit()``, and nothing is
        computed twice. The hosts are used in this order. May take a few seconds. Raises ValueError, in one line, if it is
        not known: the hosts then stay as they were.
        """
