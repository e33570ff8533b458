"""The conformance kit: suites of standard tests for plugins, and worlds whose ranks are threads of one process.

There is one suite for each kind of plugin. To test a plugin, write a subclass of the suite. The subclass returns the
objects to test, and pytest collects the standard tests from the subclass:

    from ddlcore.testing import TransportSuite

    class TestMine(TransportSuite):
        def make(self, size):
            return [MyTransport() for _ in range(size)]

``ProcessSuite`` runs the same tests with one process for each rank. Use it for a transport whose ranks cannot share a
process. If a test needs a capability that the transport does not have, the test is skipped, and the reason names the
capability. If a subclass removes a standard test, or overrides one without a reason, one test of the suite fails.

Only the suites need pytest and hypothesis (the extra ``ddlcore[testing]``). So each name of this package is imported
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddlcore.testing.adapters import AdapterSuite
    from ddlcore.testing.composed import ComposedSuite
    from ddlcore.testing.compressors import CompressorSuite
    from ddlcore.testing.devices import DeviceSuite
    from ddlcore.testing.fusion import FusionSuite
    from ddlcore.testing.launchers import LauncherSuite
    from ddlcore.testing.processes import ProcessSuite
    from ddlcore.testing.ranks import DeadlinePassed
    from ddlcore.testing.transports import TransportSuite
    from ddlcore.testing.tuners import TunerSuite
    from ddlcore.testing.world import World, run_world

__all__ = [
    "AdapterSuite",
    "ComposedSuite",
    "CompressorSuite",
    "DeadlinePassed",
    "DeviceSuite",
    "FusionSuite",
    "LauncherSuite",
    "ProcessSuite",
    "TransportSuite",
    "TunerSuite",
    "World",
    "run_world",
]

_HOME = {
    "AdapterSuite": "adapters",
    "ComposedSuite": "composed",
    "CompressorSuite": "compressors",
    "DeadlinePassed": "ranks",
    "DeviceSuite": "devices",
    "FusionSuite": "fusion",
    "LauncherSuite": "launchers",
    "ProcessSuite": "processes",
    "TransportSuite": "transports",
    "TunerSuite": "tuners",
    "World": "world",
    "run_world": "world",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
