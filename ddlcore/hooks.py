"""The hook specifications and their marker: a plugin answers with providers, which are data.

A provider names its class as ``"module:Class"``, so that listing twenty plugins imports none of
their frameworks. Entry points in the group ``ddlcore.plugins.v2`` name the module that holds the hooks.
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

ENTRY_POINT_GROUP = "ddlcore.plugins.v2"  # the number is that of the plugin contract's major version
FORMER_GROUPS = {"ddlcore.plugins": "1.0"}  # with the version that plugins in them were written for
hookspec = pluggy.HookspecMarker("ddlcore")
hookimpl = pluggy.HookimplMarker("ddlcore")


@dataclass(frozen=True)
class Provider:
    """What a plugin offers at one extension point."""

    name: str
    target: str  # "module:Class", imported when it is first used
    requires: tuple[str, ...] = ()  # modules that must be importable, found without importing them
    install: str = ""  # the exact line that makes them so
    platforms: tuple[str, ...] = ()  # values of sys.platform that it works on; empty: all
    probe: str = ""  # "module:function" without arguments: what keeps it from being used here, in one line; "": nothing
    library: str = ""  # "module:function" without arguments: the Library behind it as it is loaded, or None
    settings: tuple[Setting, ...] = ()  # rows of its own
    knobs: tuple[Knob, ...] = ()  # of them, what a search may try where this is used
    doc: str = ""
    api_version: tuple[int, int] = (2, 0)  # of the plugin contract that it was written for
    suite: str = ""  # "module:Class" of its conformance suite; empty: the kit's own for its kind. `ddl conform` runs it
    suite_over: str = ""  # what that suite puts in the place of what may be missing: then it runs here all the same


@dataclass(frozen=True)
class TransportProvider(Provider):
    """A way to move bytes between ranks; the target is a Transport, which is built without arguments.

    One that ``composes`` is built from a transport for the ranks of one host and from a function that
    makes the one across hosts, which it calls where it needs one; nobody asks for it by its own name.
    """

    devices: tuple[str, ...] = ("cpu",)
    priority: int = 0  # `auto` takes the highest that can serve
    one_host: bool = False
    in_process: bool = False  # its ranks are threads of one process
    spans_devices: bool = False  # knows by itself which ranks share a host: nothing is composed around it
    launcher: str = ""  # what its ranks must be started by, a name among the launchers; empty: anything
    composes: bool = False
    own_device: bool = False  # no two of its ranks may use one device: where two do, it cannot serve them
    attended: bool = False  # composed, it opens only where the ranks attend that have no part in it: Transport.attend
    sizes: tuple[int, int | None] = (1, None)  # least and greatest number of members


@dataclass(frozen=True)
class AdapterProvider(Provider):
    """A framework whose tensors are served; the target is an Adapter."""

    module: str = ""  # what the user imports
    framework: str = ""  # the distribution whose version `ddl info` shows
    loaders: tuple[str, ...] = ()  # modules of its loaders: a thread that stands in them waits for input


@dataclass(frozen=True)
class KernelsProvider(Provider):
    """The memory, queues and kernels of one kind of device; the target is a DeviceRuntime, built without arguments."""

    device: str = ""  # the kind, as ``Device.kind`` says it, such as cuda
    priority: int = 0  # of several for one kind, the highest that can be used is taken


@dataclass(frozen=True)
class FusionProvider(Provider):
    """A way to lay tensors out in buckets; the target is a class with the method of FusionPolicy."""


@dataclass(frozen=True)
class TunerProvider(Provider):
    """A way to search for good settings; the target is a Tuner."""


@dataclass(frozen=True)
class CheckProvider(Provider):
    """Something that `ddl doctor` looks at; the target is a Check, which is built without arguments.

    Its module is imported without its package: what a package imports may be what is broken.
    """


@dataclass(frozen=True)
class CompressorProvider(Provider):
    """A way to send fewer bytes; the target is a Compressor."""


@dataclass(frozen=True)
class ClusterProvider(Provider):
    """A launcher of others that ranks recognise by what it sets; the target is a Cluster."""

    priority: int = 0  # asked in falling order; the first that has started the process says who it is


@dataclass(frozen=True)
class LauncherProvider(Provider):
    """A way to start agents on hosts; the target is a Launcher."""

    priority: int = 0  # `auto` takes the highest that applies
    variables: tuple[str, ...] = ()  # `auto` takes it only where the environment has all of these
    optional: bool = False  # `auto` never takes it: the user or a transport asks for it by name
    whole: bool = False  # starts all ranks, those of the launching process's own host too
    per_rank: bool = False  # an agent for each rank, not for each host
    clusters: tuple[str, ...] = ()  # names of clusters whose ranks are as good as started by it


@dataclass(frozen=True)
class CommunicatorsProvider(Provider):
    """A library whose communicators ``init`` takes; the target is a Communicators."""

    module: str = ""  # top-level module of their types


@dataclass(frozen=True)
class BenchPeerProvider(Provider):
    """Another library to measure against; the target is a BenchPeer."""

    launcher: str = ""  # what its ranks must be started by, as of a transport


@dataclass(frozen=True)
class CommandProvider(Provider):
    """A subcommand of ``ddl``; the target is a click command."""

    aliases: tuple[str, ...] = field(default_factory=tuple)


class Hooks:
    """One method for each extension point. Every one returns a sequence of providers and is called once, at start-up."""

    @hookspec
    def ddl_transports(self) -> Sequence[TransportProvider]:
        """Ways to move bytes between ranks."""
        return ()

    @hookspec
    def ddl_adapters(self) -> Sequence[AdapterProvider]:
        """Frameworks whose tensors are served."""
        return ()

    @hookspec
    def ddl_kernels(self) -> Sequence[KernelsProvider]:
        """Memory, queues and kernels of accelerators."""
        return ()

    @hookspec
    def ddl_fusion_policies(self) -> Sequence[FusionProvider]:
        """Ways to lay tensors out in buckets."""
        return ()

    @hookspec
    def ddl_tuners(self) -> Sequence[TunerProvider]:
        """Ways to search for good settings."""
        return ()

    @hookspec
    def ddl_checks(self) -> Sequence[CheckProvider]:
        """What `ddl doctor` looks at."""
        return ()

    @hookspec
    def ddl_compressors(self) -> Sequence[CompressorProvider]:
        """Ways to send fewer bytes."""
        return ()

    @hookspec
    def ddl_clusters(self) -> Sequence[ClusterProvider]:
        """Launchers of others, whose ranks are recognised."""
        return ()

    @hookspec
    def ddl_launchers(self) -> Sequence[LauncherProvider]:
        """Ways to start agents on hosts."""
        return ()

    @hookspec
    def ddl_communicators(self) -> Sequence[CommunicatorsProvider]:
        """Libraries whose communicators ``init`` takes."""
        return ()

    @hookspec
    def ddl_bench_peers(self) -> Sequence[BenchPeerProvider]:
        """Other libraries to measure against."""
        return ()

    @hookspec
    def ddl_cli(self) -> Sequence[CommandProvider]:
        """Subcommands of ``ddl``."""
        return ()
