"""Define the hooks that a plugin may implement. A plugin's hooks return providers, which are plain data.

A provider names its class as a text, ``"module:Class"``. So the plugins can be listed without an import of their
frameworks. Entry points in the group ``ddlcore.plugins.v2`` name the module that contains a plugin's hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pluggy

from ddlcore.config import Setting
from ddlcore.types import Knob

__all__ = [
    "ENTRY_POINT_GROUP",
    "FORMER_GROUPS",
    "AdapterProvider",
    "BenchPeerProvider",
    "CheckProvider",
    "ClusterProvider",
    "CommandProvider",
    "CommunicatorsProvider",
    "CompressorProvider",
    "DiscoveryProvider",
    "FusionProvider",
    "Hooks",
    "KernelsProvider",
    "LauncherProvider",
    "Provider",
    "Setting",
    "TransportProvider",
    "TunerProvider",
    "hookimpl",
    "hookspec",
]

ENTRY_POINT_GROUP = "ddlcore.plugins.v2"  # the number is the major version of the plugin contract
FORMER_GROUPS = {"ddlcore.plugins": "1.0"}  # by group: the contract version of its plugins
hookspec = pluggy.HookspecMarker("ddlcore")
hookimpl = pluggy.HookimplMarker("ddlcore")


@dataclass(frozen=True)
class Provider:
    """The description of one thing that a plugin adds at an extension point."""

    name: str
    target: str  # "module:Class", imported when it is first used
    requires: tuple[str, ...] = ()  # modules that must be installed; ddl looks for them without importing them
    install: str = ""  # exact command that installs the modules in ``requires``
    platforms: tuple[str, ...] = ()  # values of sys.platform on which it works; empty: all
    probe: str = ""  # "module:function" without arguments: returns in one line why it cannot be used here, or ""
    library: str = ""  # "module:function" without arguments: returns the Library that it uses, or None
    settings: tuple[Setting, ...] = ()  # its own settings
    knobs: tuple[Knob, ...] = ()  # those of ``settings`` that a search may change while the plugin is used
    doc: str = ""
    api_version: tuple[int, int] = (2, 0)  # version of the plugin contract for which it was written
    suite: str = ""  # "module:Class" of its suite for `ddl conform`; empty: the standard suite of its kind
    suite_over: str = ""  # what the suite uses instead of hardware or software that a machine may not have


@dataclass(frozen=True)
class TransportProvider(Provider):
    """A transport, which moves bytes between ranks. The target is a Transport, which is built without arguments.

    If ``composes``, the target is built from two arguments: a transport for the ranks of one host, and a function that
    returns the transport across hosts, which the target calls if it needs one. Users do not select such a transport by
    its own name.
    """

    devices: tuple[str, ...] = ("cpu",)
    priority: int = 0  # `auto` takes the transport with the highest priority that can be used
    one_host: bool = False  # connects only ranks that share a host
    in_process: bool = False  # its ranks are threads of one process
    spans_devices: bool = False  # also connects ranks that share a host: no other transport is composed with it
    launcher: str = ""  # name of the launcher that must start its ranks; empty: any
    composes: bool = False
    own_device: bool = False  # cannot be used if two of its ranks share a device
    attended: bool = False  # when composed, opens only if the ranks outside its group call Transport.attend
    sizes: tuple[int, int | None] = (1, None)  # least and greatest number of members


@dataclass(frozen=True)
class AdapterProvider(Provider):
    """An adapter, which makes the tensors of one framework accessible. The target is an Adapter."""

    module: str = ""  # name of the module that the user imports
    framework: str = ""  # distribution whose version `ddl info` shows
    loaders: tuple[str, ...] = ()  # modules of its data loaders: a thread that runs their code is waiting for input


@dataclass(frozen=True)
class KernelsProvider(Provider):
    """Support for one kind of device: its memory, streams and kernels.

    The target is a DeviceRuntime, which is built without arguments.
    """

    device: str = ""  # value of ``Device.kind``, such as cuda
    priority: int = 0  # of several for one kind of device, the one with the highest priority is taken


@dataclass(frozen=True)
class FusionProvider(Provider):
    """A policy that decides which tensors share a bucket. The target is a class that implements FusionPolicy."""


@dataclass(frozen=True)
class TunerProvider(Provider):
    """A search algorithm that finds good settings. The target is a Tuner."""


@dataclass(frozen=True)
class CheckProvider(Provider):
    """One check of ``ddl doctor``. The target is a Check, which is built without arguments.

    The module of a check is imported without its package, because the imports of the package may fail: that may be what
    the check looks for.
    """


@dataclass(frozen=True)
class CompressorProvider(Provider):
    """A compressor, by which fewer bytes are sent. The target is a Compressor."""


@dataclass(frozen=True)
class ClusterProvider(Provider):
    """A launcher other than ddl's. Its ranks are recognized by variables that it sets. The target is a Cluster."""

    priority: int = 0  # the highest is asked first; the first that has started the process is taken


@dataclass(frozen=True)
class LauncherProvider(Provider):
    """A way to start agents on hosts. The target is a Launcher."""

    priority: int = 0  # `auto` takes the launcher with the highest priority that can be used
    variables: tuple[str, ...] = ()  # `auto` takes it only if the environment has all of these
    optional: bool = False  # `auto` never takes it: the user or a transport must ask for it by name
    whole: bool = False  # it also starts the ranks on the launching process's own host
    per_rank: bool = False  # one agent for each rank, instead of one for each host
    clusters: tuple[str, ...] = ()  # clusters whose ranks count as started by this launcher


@dataclass(frozen=True)
class DiscoveryProvider(Provider):
    """A source of hosts for an elastic job, which `--host-discovery` names. The target is a HostDiscovery."""


@dataclass(frozen=True)
class CommunicatorsProvider(Provider):
    """A library whose communicators can be passed to ``init``. The target is a Communicators."""

    module: str = ""  # top-level module of the communicators' types


@dataclass(frozen=True)
class BenchPeerProvider(Provider):
    """Another library, with which ``ddl bench`` compares ddl. The target is a BenchPeer."""

    launcher: str = ""  # name of the launcher that must start its ranks; empty: any


@dataclass(frozen=True)
class CommandProvider(Provider):
    """A subcommand of ``ddl``. The target is a click command. ``aliases`` are other names of the subcommand."""

    aliases: tuple[str, ...] = field(default_factory=tuple)


class Hooks:
    """The hooks of a plugin: one method for each extension point.

    Each method is called once, at start-up, and returns a sequence of providers.
    """

    @hookspec
    def ddl_transports(self) -> Sequence[TransportProvider]:
        """Return transports, which move bytes between ranks."""
        return ()

    @hookspec
    def ddl_adapters(self) -> Sequence[AdapterProvider]:
        """Return adapters, which make the tensors of a framework accessible."""
        return ()

    @hookspec
    def ddl_kernels(self) -> Sequence[KernelsProvider]:
        """Return the support for kinds of accelerators: memory, streams and kernels."""
        return ()

    @hookspec
    def ddl_fusion_policies(self) -> Sequence[FusionProvider]:
        """Return policies that decide which tensors share a bucket."""
        return ()

    @hookspec
    def ddl_tuners(self) -> Sequence[TunerProvider]:
        """Return search algorithms that find good settings."""
        return ()

    @hookspec
    def ddl_checks(self) -> Sequence[CheckProvider]:
        """Return checks of `ddl doctor`."""
        return ()

    @hookspec
    def ddl_compressors(self) -> Sequence[CompressorProvider]:
        """Return compressors, by which fewer bytes are sent."""
        return ()

    @hookspec
    def ddl_clusters(self) -> Sequence[ClusterProvider]:
        """Return launchers other than ddl's, so that ddl recognizes their ranks."""
        return ()

    @hookspec
    def ddl_launchers(self) -> Sequence[LauncherProvider]:
        """Return ways to start agents on hosts."""
        return ()

    @hookspec
    def ddl_discoveries(self) -> Sequence[DiscoveryProvider]:
        """Return sources of hosts for elastic jobs."""
        return ()

    @hookspec
    def ddl_communicators(self) -> Sequence[CommunicatorsProvider]:
        """Return libraries whose communicators can be passed to ``init``."""
        return ()

    @hookspec
    def ddl_bench_peers(self) -> Sequence[BenchPeerProvider]:
        """Return other libraries, with which ``ddl bench`` compares ddl."""
        return ()

    @hookspec
    def ddl_cli(self) -> Sequence[CommandProvider]:
        """Return subcommands of ``ddl``."""
        return ()
