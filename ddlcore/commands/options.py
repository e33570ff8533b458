"""Offer the settings as command-line options. Every command that takes settings has the same options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import click

from ddlcore.commands import completion
from ddlcore.commands.help import CORE, PLUGINS_PLACE, Command, Group, Option, shows_whole
from ddlcore.config.setting import GROUPS, Setting
from ddlcore.config.table import SETTINGS
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import absent_setting

_ALSO = {"network_interface": ("--network-interfaces",), "evict_after_s": ("--evict-after",)}  # its name in horovodrun
_OF_PLUGINS = "ddl.options_of_plugins"  # in click's context
# For some settings: the placeholder of the value in the help, and the function that completes the value in a shell.
_VALUES: Mapping[str, tuple[str, Any]] = {
    "backend": ("NAME", completion.backends),
    "device_dense": ("NAME", completion.devices),
    "overlap": ("auto|on|off", completion.words("auto", "on", "off")),
    "network_interface": ("NAME", None),
    "rendezvous_dir": ("DIR", completion.directories),
    "launcher": ("NAME", completion.providers("launchers", "auto")),
    "compression": ("NAME", completion.providers("compressors")),
    "autotune_log": ("FILE", completion.files),
    "tuner": ("NAME", completion.providers("tuners", "auto")),
    "fusion_policy": ("NAME", completion.providers("fusion_policies")),
    "flight_dir": ("DIR", completion.directories),
    "cache_dir": ("DIR", completion.directories),
    "log_level": ("LEVEL", None),
    "host_discovery": ("NAME", completion.providers("discoveries")),
    "host_discovery_script": ("COMMAND", completion.files),
    "host_cooldown_s": ("'FIRST LONGEST'", None),
    "plugins": ("NAMES", completion.plugins),
    "plugins_off": ("NAMES", completion.plugins),
}


def setting_options(in_brief: Collection[str] = tuple(GROUPS)) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds one option for each of the core's settings.

    The value of an option is None if the user does not give the option. ``in_brief`` holds the names of groups of
    settings. The short help of the command shows only settings of these groups.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for row in reversed(SETTINGS):
            names, described = _declared(row, CORE[row.group])
            brief = described["brief"] if row.group in in_brief else ""
            function = click.option(*names, cls=Option, **{**described, "brief": brief})(function)
        return function

    return add


class SettingsCommand(Command):
    """A command that takes settings as options: the settings of the core, and the settings of installed plugins.

    Plugins are loaded only in three cases: the core does not know an option on the command line, --help-all is given,
    or a shell asks for completions. All other command lines are parsed as fast as without plugins.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters of the command, and also the options of plugins if they are needed.

        They are needed in three cases: ``find_plugin_options`` has added them, --help-all is given, or a shell asks for
        completions.
        """
        known = super().get_params(ctx)
        if _OF_PLUGINS not in ctx.meta and (shows_whole(ctx) or ctx.resilient_parsing):
            ctx.meta[_OF_PLUGINS] = _plugin_options(known, completion.installed())
        return [*known, *ctx.meta.get(_OF_PLUGINS, ())]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line ``args``, which may contain options of plugins. Return the words that remain."""
        self.find_plugin_options(ctx, args)
        return super().parse_args(ctx, args)

    def find_plugin_options(self, ctx: click.Context, args: list[str]) -> None:
        """Add the options of plugins to the command if ``args`` contains an option that the core does not know."""
        known = {name for one in self.get_params(ctx) for name in (*one.opts, *one.secondary_opts)}
        given = (word.partition("=")[0] for word in args[: self.command_at(ctx, args)] if word.startswith("--"))
        unknown = [word for word in given if word not in known]
        if _OF_PLUGINS not in ctx.meta and unknown:
            registry = completion.installed()
            ctx.meta[_OF_PLUGINS] = _plugin_options(self.get_params(ctx), registry)
            for flag in unknown:
                name = flag.removeprefix("--").replace("-", "_")
                if registry is not None and (absent := absent_setting(name, registry)):
                    raise click.UsageError(f"{flag}: {absent}", ctx)

    def command_at(self, ctx: click.Context, args: Sequence[str]) -> int:
        """Return the number of words at the start of ``args`` that may be options of this command.

        These are the words before ``--``, or all words if there is no ``--``.
        """
        return args.index("--") if "--" in args else len(args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> completion.Items:
        """Return completions of an option's name, or of a file's path if the word belongs to the ranks' command."""
        if completion.follows_command(ctx):
            return completion.path(incomplete)
        return super().shell_complete(ctx, incomplete)


def _plugin_options(known: Sequence[click.Parameter], registry: Registry | None) -> list[Option]:
    """Return an option for each setting of the plugins in ``registry``. Without a registry, there are none.

    A setting is left out if an option in ``known`` has the same name or one of the same flags.
    """
    if registry is None:
        return []
    names = {one.name for one in known}
    flags = {flag for one in known for flag in (*one.opts, *one.secondary_opts)}
    found: dict[str, Option] = {}
    for _, provider in registry.offers():
        plugin = registry.distribution(provider).name
        own = Group(f"Plugin {plugin}", "its settings", PLUGINS_PLACE)
        for row in provider.settings:
            words, described = _declared(row, CORE.get(row.group, own))
            if row.name not in names and not flags & set(_flags(words)):
                found[row.name] = Option(words, **{**described, "brief": ""})  # none of them in the short help
    return list(found.values())


def _flags(names: Sequence[str]) -> list[str]:
    return [flag for name in names if name.startswith("-") for flag in name.split("/")]


def _declared(row: Setting, group: Group) -> tuple[list[str], dict[str, Any]]:
    """Return click's arguments for the option of a setting: the names, and the keyword arguments."""
    described: dict[str, Any] = {"default": None, "group": group, "help": _text(row), "brief": _brief(row)}
    if row.type is bool:
        return [f"{row.flag}/--no-{row.flag[2:]}", row.name], described
    kinds = {int: "N", float: "NUMBER", str: "TEXT"}
    files = completion.files if row.metavar == "FILE" else None
    metavar, complete = _VALUES.get(row.name, (row.metavar or kinds[row.type], files))
    if row.choices:
        metavar = metavar if row.name in _VALUES else "|".join(row.choices)
        complete = completion.words(*row.choices)
    if row.bare:
        complete = completion.words(row.bare)
        described = {**described, "bare": row.bare, "form": row.form}
    names = [row.flag, *_ALSO.get(row.name, ()), row.name]
    return names, {**described, "metavar": metavar, "shell_complete": complete}


def _text(row: Setting) -> str:
    default = "default: none" if row.default == "" else f"default {_default(row)}"
    return f"{row.doc[:1].upper()}{row.doc[1:]}. [{default}; {row.env}]"


def _brief(row: Setting) -> str:
    """Return the text of a setting for the short help. The text is empty if the short help leaves the setting out.

    The text ends with the default, unless the default is empty, 0 or off.
    """
    return f"{row.brief} [default {_default(row)}]" if row.brief and row.default else row.brief


def _default(row: Setting) -> str:
    if row.type is bool:
        return "on" if row.default else "off"
    return f"{row.default:g}" if isinstance(row.default, float) else str(row.default)
