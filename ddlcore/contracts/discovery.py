"""The host discovery contract: how the launcher finds out which hosts an elastic job may use at present."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ddlcore.contracts.launcher import HostSlots

__all__ = ["HostDiscovery"]


class HostDiscovery(ABC):
    """A source of the hosts of an elastic job. The class is built without arguments.

    One thread of the launcher calls ``begin`` once. Then the same thread calls ``hosts`` about once a second until the
    job has ended.
    """

    def begin(self, environ: Mapping[str, str], settings: Mapping[str, str | int | float | bool]) -> None:
        """Prepare for the calls of ``hosts``.

        ``environ``: the environment of the launching process. ``settings``: the settings of the job. Raises ValueError,
        with a message of one line, if this discovery cannot be used here. Then the job is not started.
        """
        return

    @abstractmethod
    def hosts(self) -> Sequence[HostSlots]:
        """Return the hosts that the job may use now, and the number of ranks for each. Each host occurs once.

        The launcher uses the hosts in this order. A host that was in an earlier result, but is not in this one, leaves
        the job: its ranks leave the training at the next ``commit()``, so no step is computed twice. The call may take
        a few seconds. Raises ValueError, with a message of one line, if the hosts are not known now. Then the job keeps
        its present hosts.
        """
