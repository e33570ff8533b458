"""The conformance kit: suites of standard tests for plugins, and worlds whose ranks are threads of one process.

There is one suite for each kind of plugin. To test a plugin, write a subclass of the suite. The subclass returns the
objects to test, and pytest collects the standard tests from the subclass:

    from ddl_conform import TransportSuite

    class TestMine(TransportSuite):
        def make(self, size):
            return [MyTransport() for _ in range(size)]

``ProcessSuite`` runs the same tests with one process for each rank. Use it for a transport whose ranks cannot share a
process. If a test needs a capability that the transport does not have, the test is skipped, and the reason names the
capability. If a subclass removes a standard test, or overrides one without a reason, one test of the suite fails.

Only the suites need pytest and hypothesis. So each name of this package is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddl_conform.adapter_carried import ELEMENTS
    from ddl_conform.adapters import AdapterSuite
    from ddl_conform.composed import ComposedSuite
    from ddl_conform.compressors import CompressorSuite
    from ddl_conform.devices import DeviceSuite
    from ddl_conform.fusion import FusionSuite
    from ddl_conform.launchers import LauncherSuite
    from ddl_conform.processes import ProcessSuite
    from ddl_conform.ranks import DeadlinePassed
    from ddl_conform.transports import TransportSuite
    from ddl_conform.tuners import TunerSuite
    from ddl_conform.world import World, run_world

__all__ = [
    "ELEMENTS",
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
    "ELEMENTS": "adapter_carried",
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
