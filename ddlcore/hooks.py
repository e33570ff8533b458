"""Define the hooks that a plugin may implement. A plugin's hooks return providers, which are plain data.

A provider names its class by a text, ``"module:Class"``. So ddl can list the plugins without importing their
frameworks. An entry point in the group ``ddlcore.plugins.v2`` names the module that contains a plugin's hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pluggy

from ddlcore.config.setting import Setting
from ddlcore.types import Knob, Value

__all__ = [
    "ENTRY_POINT_GROUP",
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
    "ObserverProvider",
    "Provider",
    "RecorderProvider",
    "ReleaseRange",
    "Setting",
    "TransportProvider",
    "TunerProvider",
    "WatchProvider",
    "hookimpl",
    "hookspec",
]

ENTRY_POINT_GROUP = "ddlcore.plugins.v2"  # the number is the major version of the plugin contract
hookspec = pluggy.HookspecMarker("ddlcore")  # used by the core, which specifies the hooks
hookimpl = pluggy.HookimplMarker("ddlcore")  # the decorator of a plugin's hooks


@dataclass(frozen=True)
class ReleaseRange:
    """The releases of a library with which the tests of a plugin have passed, from ``oldest`` to ``newest``.

    ``ddl info`` and ``ddl doctor`` tell the user of a release outside this range. The plugin is used all the same: if it
    cannot work with a release, its ``probe`` says so.
    """

    module: str  # top-level module of the library
    oldest: str  # such as "2.4"
    newest: str


@dataclass(frozen=True)
class Provider:
    """The description of one thing that a plugin adds at an extension point, such as one transport.

    ``target`` names the class or function that implements what the plugin adds.
    """

    name: str
    target: str  # "module:Class", imported when it is first used
    requires: tuple[str, ...] = ()  # modules that must be installed; ddl looks for them without importing them
    install: str = ""  # exact command that installs the modules in ``requires``
    platforms: tuple[str, ...] = ()  # values of sys.platform on which the target works; empty: all
    probe: str = ""  # "module:function" without arguments: returns a line why the target cannot be used here, or ""
    library: str = ""  # "module:function" without arguments: returns the Library that the target uses, or None
    tested: tuple[ReleaseRange, ...] = ()  # the libraries, such as a framework, whose releases the target depends on
    settings: tuple[Setting, ...] = ()  # the target's own settings
    knobs: tuple[Knob, ...] = ()  # those of ``settings`` that a search may change while the plugin is used
    doc: str = ""
    api_version: tuple[int, int] = (2, 0)  # version of the plugin contract for which the target was written
    suite: str = ""  # "module:Class" of the target's suite for `ddl conform`; empty: the standard suite of its kind
    suite_over: str = ""  # what the suite uses instead of hardware or software that a machine may not have
    machine_code: str = ""  # "module:name" of a MachineCode that is compiled before the ranks start


@dataclass(frozen=True)
class TransportProvider(Provider):
    """A transport, which moves bytes between ranks. ``target`` names a subclass of Transport.

    The class is built without arguments, unless ``composes`` is true. If ``composes`` is true, the class combines two
    other transports, one within hosts and one across hosts. Users do not select such a transport by its own name. The
    class is built with three arguments: the transport for the ranks of one host; a function that returns the transport
    across hosts, which the class calls only if this rank needs that transport; and the flag ``attended`` of the
    transport across hosts.
    """

    devices: tuple[str, ...] = ("cpu",)
    priority: int = 0  # `auto` takes the transport with the highest priority that can be used
    one_host: bool = False  # connects only ranks that share a host
    in_process: bool = False  # its ranks are threads of one process
    spans_devices: bool = False  # also connects ranks that share a host: no other transport is composed with it
    launcher: str = ""  # name of the launcher that must start its ranks; empty: any
    composes: bool = False
    own_device: bool = False  # cannot be used if two of its ranks share a device
    attended: bool = False  # as the part across hosts, opens only if ranks outside its group call Transport.attend
    sizes: tuple[int, int | None] = (1, None)  # least and greatest number of members


@dataclass(frozen=True)
class AdapterProvider(Provider):
    """An adapter, which makes the tensors of one framework accessible. ``target`` names a subclass of Adapter."""

    module: str = ""  # name of the module that the user imports
    framework: str = ""  # distribution whose version `ddl info` shows
    loaders: tuple[str, ...] = ()  # modules of its data loaders: a thread that runs their code is waiting for input


@dataclass(frozen=True)
class KernelsProvider(Provider):
    """Support for one kind of device: its memory, streams and kernels.

    ``target`` names a subclass of DeviceRuntime that is built without arguments.
    """

    device: str = ""  # value of ``Device.kind``, such as cuda
    priority: int = 0  # if there are several for one kind of device, the one with the highest priority is used


@dataclass(frozen=True)
class FusionProvider(Provider):
    """A policy that decides which tensors share a bucket. ``target`` names a class that implements FusionPolicy."""


@dataclass(frozen=True)
class TunerProvider(Provider):
    """A search algorithm that finds good settings. ``target`` names a subclass of Tuner."""


@dataclass(frozen=True)
class CheckProvider(Provider):
    """One check of ``ddl doctor``. ``target`` names a subclass of Check that is built without arguments.

    The module of the check is imported without the package that contains the module. The imports of that package may
    fail, and the check may exist to find the reason for such a failure.
    """


@dataclass(frozen=True)
class CompressorProvider(Provider):
    """A compressor, which makes tensors smaller before they are sent. ``target`` names a subclass of Compressor."""


@dataclass(frozen=True)
class ClusterProvider(Provider):
    """A launcher other than ddl's. ``target`` names a subclass of Cluster.

    The Cluster recognizes the ranks of that launcher by the environment variables that the launcher sets.
    """

    priority: int = 0  # clusters with a higher priority are asked first; the first that recognizes the process is used


@dataclass(frozen=True)
class LauncherProvider(Provider):
    """A way to start agents on hosts. ``target`` names a subclass of Launcher."""

    priority: int = 0  # `auto` takes the launcher with the highest priority that can be used
    variables: tuple[str, ...] = ()  # `auto` takes the launcher only if the environment has all these variables
    optional: bool = False  # `auto` never takes the launcher: the user or a transport must ask for it by name
    whole: bool = False  # the launcher also starts the ranks on the launching process's own host
    per_rank: bool = False  # one agent for each rank, instead of one for each host
    clusters: tuple[str, ...] = ()  # clusters whose ranks count as started by this launcher


@dataclass(frozen=True)
class DiscoveryProvider(Provider):
    """A source of the hosts of an elastic job. ``target`` names a subclass of HostDiscovery.

    Users choose the source by the option `--host-discovery`.
    """


@dataclass(frozen=True)
class CommunicatorsProvider(Provider):
    """A library whose communicators can be passed to ``init``. ``target`` names a subclass of Communicators."""

    module: str = ""  # top-level module of the communicators' types


@dataclass(frozen=True)
class BenchPeerProvider(Provider):
    """Another library that ``ddl bench`` compares with ddl. ``target`` names a subclass of BenchPeer."""

    launcher: str = ""  # name of the launcher that must start the library's ranks; empty: any


@dataclass(frozen=True)
class CommandProvider(Provider):
    """A subcommand of ``ddl``. ``target`` names a click command. ``aliases`` are other names of the subcommand.

    A name of two words, such as "plugins new", is that of a command below the first one, ``ddl plugins``.
    """

    aliases: tuple[str, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class WatchProvider(Provider):
    """An observer of a job in its launcher. ``target`` names a subclass of ``ddlcore.launch.job.watch.Watch``.

    The class is built with one argument, a WatchedJob, if the setting ``setting`` is neither empty nor 0. A watch sees
    the messages of ddl's own protocol, so its package must ask for exactly one version of ddlcore.
    """

    setting: str = ""  # the setting that asks for the watch, usually one of ``settings``
    asks: tuple[tuple[str, Value], ...] = ()  # settings that it needs: the launcher sets those that are empty or 0
    draws: bool = False  # draws on the terminal, so nothing else may draw there


@dataclass(frozen=True)
class ObserverProvider(Provider):
    """An observer of a rank. ``target`` names a subclass of ``ddlcore.process.observers.RankObserver``.

    In each rank, the class is built with one argument, an ObservedRank, if the setting ``setting`` is neither empty nor
    0. An observer uses parts of ddlcore that are not public, so its package must ask for exactly one version of ddlcore.
    """

    setting: str = ""  # the setting that asks for the observer, usually one of ``settings``


@dataclass(frozen=True)
class RecorderProvider(Provider):
    """A recorder of a rank's timelines. ``target`` names a subclass of ``ddlcore.runtime.recorder.Recorder``.

    Its name must be "timeline". It is built at the first call of ``start_timeline``. A recorder uses parts of ddlcore
    that are not public, so its package must ask for exactly one version of ddlcore.
    """


class Hooks:
    """The hooks of a plugin: one method for each extension point.

    Each method is called once, at start-up, and returns a sequence of providers.
    """

    @hookspec
    def ddl_transports(self) -> Sequence[TransportProvider]:
        """Return the descriptions of transports, which move bytes between ranks."""
        return ()

    @hookspec
    def ddl_adapters(self) -> Sequence[AdapterProvider]:
        """Return the descriptions of adapters, which make the tensors of a framework accessible to ddl."""
        return ()

    @hookspec
    def ddl_kernels(self) -> Sequence[KernelsProvider]:
        """Return the descriptions of the supported kinds of accelerators: their memory, streams and kernels."""
        return ()

    @hookspec
    def ddl_fusion_policies(self) -> Sequence[FusionProvider]:
        """Return the descriptions of policies that decide which tensors share a bucket."""
        return ()

    @hookspec
    def ddl_tuners(self) -> Sequence[TunerProvider]:
        """Return the descriptions of search algorithms that find good settings."""
        return ()

    @hookspec
    def ddl_checks(self) -> Sequence[CheckProvider]:
        """Return the descriptions of checks that `ddl doctor` runs."""
        return ()

    @hookspec
    def ddl_compressors(self) -> Sequence[CompressorProvider]:
        """Return the descriptions of compressors, which make tensors smaller before they are sent."""
        return ()

    @hookspec
    def ddl_clusters(self) -> Sequence[ClusterProvider]:
        """Return the descriptions of launchers other than ddl's, so that ddl recognizes the ranks of each launcher."""
        return ()

    @hookspec
    def ddl_launchers(self) -> Sequence[LauncherProvider]:
        """Return the descriptions of ways to start agents on hosts."""
        return ()

    @hookspec
    def ddl_discoveries(self) -> Sequence[DiscoveryProvider]:
        """Return the descriptions of sources of the hosts of elastic jobs."""
        return ()

    @hookspec
    def ddl_communicators(self) -> Sequence[CommunicatorsProvider]:
        """Return the descriptions of libraries whose communicators users can pass to ``init``."""
        return ()

    @hookspec
    def ddl_bench_peers(self) -> Sequence[BenchPeerProvider]:
        """Return the descriptions of other libraries that ``ddl bench`` compares with ddl."""
        return ()

    @hookspec
    def ddl_cli(self) -> Sequence[CommandProvider]:
        """Return the descriptions of subcommands of ``ddl``."""
        return ()

    @hookspec
    def ddl_watches(self) -> Sequence[WatchProvider]:
        """Return the descriptions of observers of jobs, which the launchers build and tell what happens."""
        return ()

    @hookspec
    def ddl_observers(self) -> Sequence[ObserverProvider]:
        """Return the descriptions of observers of ranks, which each rank builds when it begins to train."""
        return ()

    @hookspec
    def ddl_recorders(self) -> Sequence[RecorderProvider]:
        """Return the descriptions of recorders, which record timelines of ranks."""
        return ()
