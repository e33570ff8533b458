"""Creates the compressors of a job, each when it is first used."""

from __future__ import annotations

from collections.abc import Callable

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.errors import InvalidArgument
from ddlcore.messages.spec import BY_SETTING
from ddlcore.plug.registry import Registry


class Compressors:
    """The compressors of one job.

    ``kernels`` are those for host memory. ``by_setting`` returns the present value of the setting ``compression``.
    """

    def __init__(self, registry: Registry, kernels: Kernels, by_setting: Callable[[], str]) -> None:
        self._by_setting = by_setting
        self._registry = registry
        self.kernels = kernels
        self._made: dict[str, Compressor] = {}

    def get(self, name: str) -> Compressor:
        """Return the compressor called ``name`` for host memory. Raises InvalidArgument for a name that no plugin offers.

        For the name "setting", return the compressor that the setting ``compression`` names on this rank. Buckets do
        not use this result for "setting": the coordinator chooses the compressor of a bucket for all ranks, see
        ``Spec.compressor_by``.
        """
        if name == BY_SETTING:
            name = self._by_setting()
        compressor = self._made.get(name)
        if compressor is None:
            compressor = self._made[name] = self.make(name, self.kernels)
        return compressor

    def make(self, name: str, kernels: Kernels) -> Compressor:
        """Return a new compressor called ``name`` that uses ``kernels``. The errors are those of ``get``."""
        offered = self._registry.compressors
        if name not in offered:
            raise InvalidArgument(f"no compressor is called {name!r}; there are {', '.join(sorted(offered))}")
        compressor: Compressor = self._registry.load(offered[name])(kernels)
        return compressor
