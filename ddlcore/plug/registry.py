"""Store the providers of all plugin kinds by name, and import the class of a provider when the class is first used.

A provider describes one object that a plugin adds to ddl, such as a transport, without importing it. loader.py adds the
providers to the registry.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

from ddlcore.config.table import SETTINGS
from ddlcore.contracts import (
    API_VERSION,
    Adapter,
    Cluster,
    Communicators,
    Compressor,
    DeviceRuntime,
    FusionPolicy,
    HostDiscovery,
    Launcher,
    Library,
    Transport,
    Tuner,
)
from ddlcore.errors import PluginError
from ddlcore.hooks import (
    AdapterProvider,
    BenchPeerProvider,
    CheckProvider,
    ClusterProvider,
    CommandProvider,
    CommunicatorsProvider,
    CompressorProvider,
    DiscoveryProvider,
    FusionProvider,
    KernelsProvider,
    LauncherProvider,
    ObserverProvider,
    Provider,
    RecorderProvider,
    TransportProvider,
    TunerProvider,
    WatchProvider,
)
from ddlcore.plug.aliases import ALIASES
from ddlcore.plug.finding import find, raised_at, run_alone
from ddlcore.text.installing import as_installed, pip_install
from ddlcore.text.nearest import nearest

if TYPE_CHECKING:
    import click

    from ddlcore.contracts import BenchPeer, Check

P = TypeVar("P", bound=Provider)
log = logging.getLogger("ddl")


class Distribution(NamedTuple):
    """The installed distribution (package) that contains a provider: name and version as ``pip list`` shows them."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Refusal(NamedTuple):
    """Says that a plugin, or one of its providers, is not used, and why."""

    origin: Distribution
    name: str  # name of the provider, or of the entry point if the whole plugin is refused
    kind: str  # word for the kind of the provider; "": the whole plugin is refused
    reason: str  # what is wrong and what to do
    off: bool = False  # excluded by the user's allow or deny list, so this is not a problem


def _off(refusal: Refusal) -> str:
    return f"{refusal.origin} is off: {refusal.reason}"


class PluginKind(Generic[P]):
    """One kind of plugin, such as transports.

    Each kind is an attribute of the class ``Registry``. If the same attribute is read from a Registry object, the value
    is a dictionary with the object's providers of this kind by name.
    """

    def __init__(
        self, provider: type[P], word: str, hook: str, contract: type | str | None = None, *, is_object: bool = False
    ) -> None:
        self.provider = provider  # the class of the providers of this kind
        self.word = word  # the name of the kind in messages
        self.hook = hook  # the name of the hook that returns the providers
        # The base class of a provider's target, or "module:Class" if this module must not import it. None: the type is
        # not checked.
        self._contract = contract
        self._is_object = is_object  # the target is an object of that class, not a subclass

    def objection(self, target: object) -> str:
        """Return what the type of a provider's ``target`` should be and is not, such as "Transport"; "" if it fits."""
        contract = self._contract
        if isinstance(contract, str):
            module, _, name = contract.partition(":")
            try:
                contract = getattr(importlib.import_module(module), name)
            except ImportError as error:  # the class is in another package: the target cannot be of it
                return f"{module}.{name} ({error})"
        elif contract is None:
            return ""
        fits = (
            isinstance(target, contract)
            if self._is_object
            else isinstance(target, type) and issubclass(target, contract)
        )
        return "" if fits else contract.__name__

    @overload
    def __get__(self, registry: None, owner: type[Registry]) -> PluginKind[P]: ...
    @overload
    def __get__(self, registry: Registry, owner: type[Registry]) -> dict[str, P]: ...
    def __get__(self, registry: Registry | None, owner: type[Registry]) -> PluginKind[P] | dict[str, P]:
        return self if registry is None else registry.of(self)


class Registry:
    """All providers, by kind and name. The attributes of this class are the only list of the plugin kinds.

    The registry is filled once at start-up; after that, any thread may read it. ``problems`` has one line of text for
    each plugin or provider that was refused, with the name of its distribution. ``refusals`` has the same information
    as objects. In addition, ``refusals`` has the plugins that the user's allow or deny list excludes.
    """

    transports = PluginKind(TransportProvider, "transport", "ddl_transports", Transport)
    adapters = PluginKind(AdapterProvider, "adapter", "ddl_adapters", Adapter)
    kernels = PluginKind(KernelsProvider, "kernels", "ddl_kernels", DeviceRuntime)
    fusion_policies = PluginKind(FusionProvider, "fusion policy", "ddl_fusion_policies")  # any class with its method
    tuners = PluginKind(TunerProvider, "tuner", "ddl_tuners", Tuner)
    checks = PluginKind(CheckProvider, "check", "ddl_checks", "ddlcore.contracts.check:Check")
    compressors = PluginKind(CompressorProvider, "compressor", "ddl_compressors", Compressor)
    clusters = PluginKind(ClusterProvider, "cluster", "ddl_clusters", Cluster)
    launchers = PluginKind(LauncherProvider, "launcher", "ddl_launchers", Launcher)
    discoveries = PluginKind(DiscoveryProvider, "host discovery", "ddl_discoveries", HostDiscovery)
    communicators = PluginKind(CommunicatorsProvider, "library of communicators", "ddl_communicators", Communicators)
    bench_peers = PluginKind(BenchPeerProvider, "bench peer", "ddl_bench_peers", "ddlcore.contracts.bench:BenchPeer")
    commands = PluginKind(CommandProvider, "command", "ddl_cli", "click:Command", is_object=True)
    watches = PluginKind(WatchProvider, "watch", "ddl_watches", "ddlcore.launch.job.watch:Watch")
    observers = PluginKind(ObserverProvider, "observer", "ddl_observers", "ddlcore.process.observers:RankObserver")
    recorders = PluginKind(RecorderProvider, "recorder", "ddl_recorders", "ddlcore.runtime.recorder:Recorder")

    def __init__(self) -> None:
        self._tables: dict[type[Provider], dict[str, Any]] = {kind.provider: {} for kind in self.kinds().values()}
        self.problems: list[str] = []
        self.refusals: list[Refusal] = []
        self._origins: dict[Provider, Distribution] = {}
        self._rows = {row.name: (row, "ddlcore") for row in SETTINGS}

    @classmethod
    def kinds(cls) -> dict[str, PluginKind[Any]]:
        """Return every plugin kind, by the name of the attribute of this class that contains the kind."""
        return {name: kind for name, kind in vars(cls).items() if isinstance(kind, PluginKind)}

    def of(self, kind: PluginKind[P]) -> dict[str, P]:
        """Return the providers of ``kind`` by name."""
        return self._tables[kind.provider]

    # --- by name

    def named(self, kind: PluginKind[P], name: str) -> P:
        """Return the provider of ``kind`` that is called ``name``.

        Raises PluginError if there is no such provider. The message contains the command that installs the provider, if
        this command is known. If it is not known, the message contains a similar name or all names that exist.
        """
        table = self.of(kind)
        if name in table:
            return table[name]
        known = ALIASES.get(kind.word, {})
        left_out = self.left_out(name)
        what_next = f"there are {', '.join(sorted(table)) or 'none'}"
        if name in known:
            what_next = self.off(known[name]) or f"install it: {pip_install(known[name])}"
            left_out = left_out.replace(f"; {what_next}", "")
        elif near := nearest(name, {*table, *known}):
            what_next = f"did you mean '{near}'?"
        raise PluginError(f"no {kind.word} is called '{name}'; {what_next}{left_out}")

    def transport(self, name: str) -> TransportProvider:
        """Return the provider of the transport called ``name``. Raises PluginError if there is none, see ``named``."""
        return self.named(Registry.transports, name)

    def kernels_for(self, kind: str) -> KernelsProvider:
        """Return the provider of kernels for devices of the kind ``kind``, such as "cuda".

        If several providers can be used here, return the one with the highest priority. If none can be used, raises
        PluginError with a message that says why the installed providers cannot be used, or how to install a provider.
        """
        offered = [one for one in self.kernels.values() if one.device == kind]
        objections = []
        for one in sorted(offered, key=lambda one: (-one.priority, one.name)):
            missing = self.missing(one)
            if not missing:
                return one
            objections.append(f"{one.name}: {missing}")
        name = ALIASES["kernels"].get(kind)
        known = "; ".join(objections) or "no installed plugin serves it" + (
            f"; {self.off(name) or f'install one: {pip_install(name)}'}" if name else ""
        )
        raise PluginError(f"memory of {kind} cannot be used ({known}); or pass a copy in host memory")

    def communicators_of(self, comm: object) -> CommunicatorsProvider | None:
        """Return the provider for the library that defines the class of the communicator ``comm``.

        Return None if no plugin knows this library. This method imports no module.
        """
        modules = {one.__module__.partition(".")[0] for one in type(comm).__mro__}
        return next((p for p in self.communicators.values() if p.module in modules), None)

    def left_out(self, name: str) -> str:
        """Return text that says why plugins or providers called ``name`` are not used, for the end of a message.

        Return "" if no plugin or provider of this name was refused or excluded.
        """
        off = [_off(one) for one in self.refusals if one.off and one.name == name]
        return "".join(f"; {line}" for line in [*(one for one in self.problems if f"'{name}'" in one), *off])

    def off(self, distribution: str) -> str:
        """Return why the user's lists exclude ``distribution``, such as "ddl-shm"; "" if they do not exclude it."""
        return next((_off(one) for one in self.refusals if one.off and one.origin.name == distribution), "")

    def transports_off(self) -> str:
        """Return text that says which known distributions with transports are excluded, for the end of a message."""
        lines = map(self.off, dict.fromkeys(ALIASES["transport"].values()))
        return "".join(f"; {line}" for line in lines if line)

    # --- one provider

    def distribution(self, provider: Provider) -> Distribution:
        """Return the name and version of the distribution of ``provider``, which must be in this registry."""
        return self._origins[provider]

    def offers(self) -> list[tuple[str, Provider]]:
        """Return (word for the kind, provider) for every provider, sorted by kind."""
        return [(kind.word, one) for kind in _KINDS.values() for one in self.of(kind).values()]

    def distributions(self) -> set[str]:
        """Return the names of all distributions that contain a provider, each as the distribution itself writes it."""
        return {origin.name for origin in self._origins.values()}

    def missing(self, provider: Provider) -> str:
        """Return the reason why ``provider`` cannot be used here.

        If a module is missing, the text also has the command that installs it. Return "" if the provider can be used.
        The only module that this method imports is the module of the provider's probe, a function that tests whether
        the provider can be used. For the modules that the provider requires, the method only checks that they exist.
        """
        if provider.platforms and sys.platform not in provider.platforms:
            return f"works on {' and '.join(provider.platforms)} only; this is {sys.platform}"
        absent = [module for module in provider.requires if find(module) is None]
        if not absent:
            return self._probed(provider)
        line = provider.install or f"pip install {' '.join(module.partition('.')[0] for module in absent)}"
        return f"{', '.join(absent)} not installed; {as_installed(line)}"

    def _probed(self, provider: Provider) -> str:
        if not provider.probe:
            return ""
        try:
            return as_installed(str(_function(provider.probe)()))
        except Exception as error:  # a plugin's probe may raise anything
            return f"{provider.probe} failed: {raised_at(error)}"

    def library(self, provider: Provider) -> Library | None:
        """Return the name and version of the external library that the target of ``provider`` uses in this process.

        The target is the object that ``load`` returns. Return None if the target uses no such library, if the library
        cannot be loaded, or if the provider cannot be used here.
        """
        if not provider.library or self.missing(provider):
            return None
        try:
            found: object = _function(provider.library)()
        except Exception:
            log.debug("%s failed", provider.library, exc_info=True)
            return None
        return found if isinstance(found, Library) else None

    @overload
    def load(self, provider: TransportProvider) -> type[Transport]: ...
    @overload
    def load(self, provider: AdapterProvider) -> type[Adapter]: ...
    @overload
    def load(self, provider: FusionProvider) -> Callable[[], FusionPolicy]: ...
    @overload
    def load(self, provider: KernelsProvider) -> type[DeviceRuntime]: ...
    @overload
    def load(self, provider: TunerProvider) -> type[Tuner]: ...
    @overload
    def load(self, provider: CheckProvider) -> type[Check]: ...
    @overload
    def load(self, provider: CompressorProvider) -> type[Compressor]: ...
    @overload
    def load(self, provider: ClusterProvider) -> type[Cluster]: ...
    @overload
    def load(self, provider: LauncherProvider) -> Callable[[], Launcher]: ...
    @overload
    def load(self, provider: DiscoveryProvider) -> Callable[[], HostDiscovery]: ...
    @overload
    def load(self, provider: CommunicatorsProvider) -> Callable[[], Communicators]: ...
    @overload
    def load(self, provider: BenchPeerProvider) -> type[BenchPeer]: ...
    @overload
    def load(self, provider: CommandProvider) -> click.Command: ...
    @overload
    def load(self, provider: WatchProvider | ObserverProvider | RecorderProvider) -> type[Any]: ...
    def load(self, provider: Provider) -> object:
        """Import and return the target of ``provider``.

        The target is usually a class; the target of a command is a click command. Raises PluginError if a required
        module is missing, if the module of the target cannot be imported, or if the target does not have the type that
        the plugin contract requires. The message names the distribution, and says what the user can do.
        """
        who = f"{_KINDS[type(provider)].word} '{provider.name}' of {self.distribution(provider)}"
        missing = self.missing(provider)
        if missing:
            raise PluginError(f"{who} cannot be used: {missing}")
        module, _, attribute = provider.target.partition(":")
        try:
            # A check examines a part that may be broken, and the package of the check may import this part. So do not
            # import the package.
            imported = run_alone if isinstance(provider, CheckProvider) else importlib.import_module
            found: object = imported(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except Exception as error:  # a plugin's module may raise anything while it is imported
            raise PluginError(f"{who}: {provider.target} cannot be loaded: {raised_at(error)}") from error
        objection = _KINDS[type(provider)].objection(found)
        if objection:
            raise PluginError(f"{who}: {provider.target} is no {objection}")
        return found

    # --- filling; only the loader calls these

    def offer(self, provider: Provider, origin: Distribution) -> None:
        """Add ``provider``, which the distribution ``origin`` contains, or record why the provider is refused.

        The provider is refused if it was built for another version of the plugin contract, if its target is malformed,
        if an earlier provider has the same name or a setting of the same name, or if it could never be used.
        """
        kind = _KINDS[type(provider)]
        table = self.of(kind)
        who = f"{kind.word} '{provider.name}' of {origin}"
        if provider.api_version[0] != API_VERSION[0]:
            theirs, ours = (".".join(map(str, version)) for version in (provider.api_version, API_VERSION))
            wrong = (
                f"it was built for plugin contract {theirs}, this ddlcore has {ours}; "
                f"install releases of {origin.name} and ddlcore that fit together"
            )
        elif provider.name in table:
            first = self._origins[table[provider.name]]
            wrong = f"{first} offers that name already; " + (
                f"uninstall {origin.name}, or keep it from loading by DDL_PLUGINS_OFF={origin.name}"
                if first != origin
                else "each needs a name of its own"
            )
        elif not all(part.strip() for part in provider.target.split(":")) or provider.target.count(":") != 1:
            wrong = f"its target '{provider.target}' is not of the form module:name"
        elif taken := [row.name for row in provider.settings if self._rows.get(row.name, (row, ""))[0] != row]:
            theirs = self._rows[taken[0]][1]
            wrong = f"its setting '{taken[0]}' is one of {theirs} already; give it a name that begins with its own"
        elif isinstance(provider, CommandProvider) and (words := self._words_of_commands() & {*provider.aliases}):
            wrong = f"its alias '{min(words)}' is a command already; leave it out"
        elif isinstance(provider, CommandProvider) and provider.name in self._words_of_commands():
            wrong = "its name is an alias of another command; it needs a name of its own"
        elif isinstance(provider, (WatchProvider, ObserverProvider)) and (
            provider.setting not in self._settings_for(provider, origin)
        ):
            wrong = (
                f"it is built if its setting asks for it, and '{provider.setting}' is no setting of ddl or of "
                "this package; name one in the field `setting`, usually one of its `settings`"
            )
        elif isinstance(provider, RecorderProvider) and provider.name != "timeline":
            wrong = "start_timeline() uses the recorder that is called 'timeline', and no other"
        else:
            table[provider.name] = provider
            self._origins[provider] = origin
            self._rows.update({row.name: (row, str(origin)) for row in provider.settings})
            return
        self.problems.append(f"{who} is refused: {wrong}")
        self.refusals.append(Refusal(origin, provider.name, kind.word, wrong))

    def _settings_for(self, provider: Provider, origin: Distribution) -> set[str]:
        """Return the settings of the core, of ddl's own plugins, and of ``provider`` and earlier ones of its distribution.

        Settings of other distributions are left out: whether they are known already depends on the order of loading.
        """
        known = set(ALIASES["setting"])
        known |= {name for name, (_, owner) in self._rows.items() if owner in ("ddlcore", str(origin))}
        return known | {row.name for row in provider.settings}

    def _words_of_commands(self) -> set[str]:
        return {word for one in self.commands.values() for word in (one.name, *one.aliases)}

    def refuse(self, origin: Distribution, entry: str, reason: str) -> None:
        """Record that the plugin with the entry point ``entry`` of the distribution ``origin`` is not used.

        ``reason`` says why the plugin is not used.
        """
        self.problems.append(f"plugin '{entry}' of {origin} is not used: {reason}")
        self.refusals.append(Refusal(origin, entry, "", reason))


def _function(target: str) -> Callable[[], object]:
    """Return the function that ``target`` names.

    ``target`` has the form ``module:function``. The module is imported without running the ``__init__`` of its package.
    """
    module, _, name = target.partition(":")
    found: Callable[[], object] = getattr(run_alone(module), name)
    return found


_KINDS = {kind.provider: kind for kind in Registry.kinds().values()}
