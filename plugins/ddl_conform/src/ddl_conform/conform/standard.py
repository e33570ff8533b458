"""Makes the suites for plugins whose providers name no suite of their own.

A suite is made from the provider and the class that it describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddlcore.contracts import Compressor, FusionPolicy, Knob, Launcher, Transport, Tuner
from ddlcore.hooks import (
    CompressorProvider,
    FusionProvider,
    LauncherProvider,
    Provider,
    TransportProvider,
    TunerProvider,
)
from ddlcore.plug import Registry
from ddlcore.plug.settings import settings_of

Settings = Mapping[str, str | int | float | bool]
SIZES = (1, 2, 3, 4)


def _settings(registry: Registry) -> Settings:
    """Return the default settings of the core and of all plugins. Environment variables are ignored."""
    return settings_of({}, registry=registry)[0]


def _titled(provider: Provider, suite: type) -> Any:
    suite.__name__ = suite.__qualname__ = f"Test{provider.name.title().replace('-', '').replace('_', '')}"
    return suite


def transport(provider: TransportProvider, tested: type[Transport], registry: Registry) -> Any:
    """Return a suite that tests the transport class ``tested``, which is called without arguments.

    All ranks are threads of one process.
    """
    from ddl_conform.transports import TransportSuite

    least, most = provider.sizes
    settings = _settings(registry)

    class Suite(TransportSuite):
        sizes = tuple(size for size in SIZES if least <= size <= (most or max(SIZES)))

        def make(self, size: int) -> Sequence[Transport]:
            return [tested() for _ in range(size)]

        def settings(self) -> Settings:
            return settings

    return _titled(provider, Suite)


def killed(provider: TransportProvider, registry: Registry) -> Any:
    """Return a suite that runs the ranks of a transport in processes, and kills one of these processes.

    If that is impossible for this transport, the test of the suite is skipped, and the reason says why.
    """
    from ddl_conform.killed import KilledSuite

    least, most = provider.sizes
    why_not = ""
    if provider.in_process:
        why_not = "its ranks are threads of one process: none can be killed alone"
    elif provider.launcher:
        why_not = f"its ranks must be started by {provider.launcher}, which ends all where one is killed"
    elif provider.composes:
        why_not = "it is made of two others, which are tried by themselves"
    elif missing := registry.missing(provider):
        why_not = f"it cannot be used here: {missing}"
    elif least > 3 or (most or 3) < 3:
        why_not = "it does not serve three ranks"
    told = {"target": provider.target, "settings": dict(_settings(registry)), "why_not": why_not}
    return type("TestKilled", (KilledSuite,), told)


def fusion(provider: FusionProvider, tested: Any, registry: Registry) -> Any:
    """Return a suite that tests the fusion policy class ``tested``, which is called without arguments."""
    from ddl_conform.fusion import FusionSuite

    class Suite(FusionSuite):
        def make(self) -> FusionPolicy:
            policy: FusionPolicy = tested()
            return policy

    return _titled(provider, Suite)


def compressor(provider: CompressorProvider, tested: type[Compressor], registry: Registry) -> Any:
    """Return a suite that tests the compressor class ``tested``, which must be lossless.

    The author of a lossy compressor must write a suite, which sets the allowed error.
    """
    from ddl_conform.compressors import CompressorSuite

    return _titled(provider, type("Suite", (CompressorSuite,), {"compressor": tested}))


def launcher(provider: LauncherProvider, tested: type[Launcher], registry: Registry) -> Any:
    """Return a suite that tests the launcher class ``tested``, which is called without arguments."""
    from ddl_conform.launchers import LauncherSuite

    settings = _settings(registry)
    asked = provider

    class Suite(LauncherSuite):
        provider = asked

        def make(self) -> Launcher:
            return tested()

        def settings(self) -> Settings:
            return settings

    return _titled(provider, Suite)


def tuner(provider: TunerProvider, tested: type[Tuner], registry: Registry) -> Any:
    """Return a suite that tests the tuner class ``tested``, which is called with a list of knobs and a seed."""
    from ddl_conform.tuners import TunerSuite

    class Suite(TunerSuite):
        def make(self, knobs: Sequence[Knob], seed: int) -> Tuner:
            return tested(knobs, seed)

    return _titled(provider, Suite)
