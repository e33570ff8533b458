"""The conformance kit: worlds of threads, and one suite of standard tests for each kind of plugin.

A plugin's test is a subclass of a suite. It says how to make the object that is tested, and pytest collects the
standard tests:

    from ddlcore.testing import TransportSuite

    class TestMine(TransportSuite):
        def make(self, size):
            return [MyTransport() for _ in range(size)]

``ProcessSuite`` does the same with one process for each rank, for transports whose ranks cannot share a process. A test
that needs a capability which the transport does not have is skipped, and the reason names the capability. A standard
test that a subclass removes, or overrides without a reason, fails. Only the suites need pytest and hypothesis
(the extra ``ddlcore[testing]``), so each name is imported when it is first used.
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
