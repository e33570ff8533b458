"""Load plugins once at start-up: the built-in plugin and the plugins of installed distributions (packages).

A distribution announces a plugin by an entry point. If a plugin is broken, the registry's problems get one line of
text, and the other plugins are still loaded. A plugin offers providers, which describe the objects that it adds to ddl.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points
from importlib.metadata import version as installed_version

import pluggy

from ddlcore.config.loading import Settings
from ddlcore.errors import PluginError
from ddlcore.hooks import ENTRY_POINT_GROUP, Hooks, Provider
from ddlcore.plug.finding import raised_at, run_alone
from ddlcore.plug.registry import Distribution, Refusal, Registry
from ddlcore.text.nearest import nearest

_Found = tuple[Distribution, EntryPoint]
_BUILTIN = "ddlcore.builtin.plugin"
_HOOKS = {kind.hook: kind.provider for kind in Registry.kinds().values()}


def load_plugins(settings: Settings) -> Registry:
    """Ask every plugin once for its providers, and return a registry with all providers.

    The built-in plugin is asked first, and the other plugins follow in the order of their names. ``settings`` contain
    the allow list (``plugins``) and the deny list (``plugins_off``), with names of entry points or of distributions. A
    broken plugin raises no error here: it is added to ``Registry.problems``.
    """
    registry = Registry()
    _introduce(importlib.import_module(_BUILTIN), _core(), registry)
    for origin, entry in _chosen(_installed(), settings, registry):
        try:
            with redirect_stdout(sys.stderr):  # a plugin's output must not mix with the output of a command
                _introduce(_plugin(entry), origin, registry)
        except (Exception, SystemExit) as error:  # plugins may raise anything; KeyboardInterrupt passes
            what = raised_at(error) if not isinstance(error, PluginError) else f"PluginError: {error}"
            registry.refuse(origin, entry.name, f"{what}; keep it from loading by DDL_PLUGINS_OFF={entry.name}")
    return registry


def _installed() -> list[_Found]:
    """Return the entry points of all plugins that installed distributions announce, sorted by name."""
    found = [(_origin(entry), entry) for entry in entry_points(group=ENTRY_POINT_GROUP)]
    return sorted(found, key=lambda one: (one[0].name, one[1].name))


def _plugin(entry: EntryPoint) -> object:
    """Import and return the module, or the object in a module, that the entry point names."""
    plugin: object = run_alone(entry.module)
    for part in entry.attr.split(".") if entry.attr else ():
        plugin = getattr(plugin, part)
    return plugin


def _introduce(plugin: object, origin: Distribution, registry: Registry) -> None:
    """Add all providers of ``plugin``, which the distribution ``origin`` announces, to the registry.

    If one of the plugin's hooks is wrong, raise PluginError or an error of pluggy, and add no provider.
    """
    manager = pluggy.PluginManager("ddlcore")  # one for each plugin, so that a broken plugin does not affect the others
    manager.add_hookspecs(Hooks)
    manager.register(plugin)  # raises for a hook with arguments that its specification lacks
    try:
        manager.check_pending()  # raises for a hook without a specification
    except pluggy.PluginValidationError as error:
        names = [caller.name for caller in manager.get_hookcallers(plugin) or () if caller.name not in _HOOKS]
        raise PluginError(_unknown(names[0]) if names else str(error)) from error
    if not manager.get_hookcallers(plugin):
        raise PluginError("it has no hook; mark its functions with ddlcore.hooks.hookimpl")
    offered: list[Provider] = []
    for hook, kind in _HOOKS.items():
        caller = getattr(manager.hook, hook)
        answers = caller()
        if len(answers) < len(caller.get_hookimpls()):  # pluggy omits results that are None
            raise PluginError(f"{hook} returned None; it must return a list of {kind.__name__}")
        for answer in answers:
            offered += [_checked(provider, hook, kind) for provider in answer]
    for provider in offered:
        registry.offer(provider, origin)


def _unknown(hook: str) -> str:
    near = nearest(hook, _HOOKS, 0.6) or " or ".join(sorted(_HOOKS))
    return f"unknown hook '{hook}'; did its author mean {near}?"


def _checked(provider: object, hook: str, kind: type[Provider]) -> Provider:
    if type(provider) is not kind:
        raise PluginError(f"{hook} returned {provider!r:.80}, which is no {kind.__name__}")
    return provider


def _chosen(installed: Iterable[_Found], settings: Settings, registry: Registry) -> list[_Found]:
    """Return the entry points in ``installed`` that the allow list and the deny list in ``settings`` do not exclude.

    Excluded plugins are added to ``registry.refusals``. If a name in one of the lists is not the name of any plugin, a
    line is added to ``registry.problems``.
    """
    only = {_plain(name) for name in settings.names("plugins")}
    off = {_plain(name) for name in settings.names("plugins_off")}
    chosen = []
    known: set[str] = set()
    for origin, entry in installed:
        names = {_plain(entry.name), _plain(origin.name)}
        known |= names
        if names & off:
            registry.refusals.append(Refusal(origin, entry.name, "", "DDL_PLUGINS_OFF names it", off=True))
        elif only and not names & only:
            registry.refusals.append(Refusal(origin, entry.name, "", "DDL_PLUGINS does not name it", off=True))
        else:
            chosen.append((origin, entry))
    for variable, wanted in (("DDL_PLUGINS", only), ("DDL_PLUGINS_OFF", off)):
        for name in sorted(wanted - known):
            there = ", ".join(sorted(known)) or "no plugins"
            registry.problems.append(f"{variable} names '{name}', but installed are {there}")
    return chosen


def _plain(name: str) -> str:
    """Return ``name``, a distribution's name, in the normal form of package indexes: ddl_mine becomes ddl-mine."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _origin(entry: EntryPoint) -> Distribution:
    if entry.dist is None:
        return Distribution("unknown", "0")
    metadata = entry.dist.metadata  # parsed again at each access, also for name and version
    return Distribution(metadata["Name"], metadata["Version"])


def _core() -> Distribution:
    try:
        return Distribution("ddlcore", installed_version("ddlcore"))
    except PackageNotFoundError:
        return Distribution("ddlcore", "from source")
