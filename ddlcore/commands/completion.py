"""Tell a shell the words that can complete a command line: names of plugins, values of settings, and files.

click calls the functions of this module only if a shell asks for completions; the shell sets ``_DDL_COMPLETE`` then.
These functions never raise an exception, because the shell would print the error into the line that the user types.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ddlcore.plug.registry import Registry

    Items = list[CompletionItem[str]]
    Completer = Callable[[click.Context, click.Parameter, str], Items]


def installed() -> Registry | None:
    """Return the registry of the installed plugins, or None if a variable ``DDL_*`` has an invalid value.

    The command itself reports the invalid value when the user runs the command.
    """
    from ddlcore.plug.settings import settings_of

    try:
        return settings_of(os.environ)[1]
    except ValueError:
        return None


def items(names: Mapping[str, str] | Iterable[str], incomplete: str, before: str = "") -> Items:
    """Return a completion for each of ``names`` that begins with ``incomplete``.

    The text ``before`` is put in front of each completion. If ``names`` is a mapping, its values are descriptions of
    the names. Some shells show these descriptions.
    """
    from click.shell_completion import CompletionItem

    texts = names if isinstance(names, Mapping) else dict.fromkeys(names, "")
    return [
        CompletionItem(before + name, help=text or None) for name, text in texts.items() if name.startswith(incomplete)
    ]


def path(incomplete: str, kind: str = "file") -> Items:
    """Tell the shell to complete a path by itself: the path of any file, or of a directory if ``kind`` is "dir"."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type=kind)]


def follows_command(ctx: click.Context) -> bool:
    """Return whether the command line already has the first word of the ranks' command, such as ``python``.

    If so, all further words belong to the ranks' command.
    """
    return bool(ctx.params.get("command"))


def _completer(offer: Callable[[str], Items]) -> Completer:
    """Return a completer of an option's values. ``offer`` returns the completions of an incomplete word."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
        return path(incomplete) if follows_command(ctx) else offer(incomplete)

    return complete


def words(*choices: str, many: bool = False) -> Completer:
    """Return a completer for an option that takes one of ``choices``, or a list separated by commas if ``many``."""
    names = dict.fromkeys(choices, "")
    return _completer(lambda incomplete: _listed(names, incomplete) if many else items(names, incomplete))


def providers(kind: str, *more: str, many: bool = False) -> Completer:
    """Return a completer for an option whose values are the names of things that plugins add, such as tuners.

    ``kind`` is the plugin kind of these things, as an attribute of the registry, such as "tuners". ``more`` are further
    valid words. If ``many`` is true, the option takes several names, separated by commas.
    """

    def offer(incomplete: str) -> Items:
        registry = installed()
        if registry is None:
            return []
        names = {
            **dict.fromkeys(more, ""),
            **{one.name: one.doc for one in registry.of(registry.kinds()[kind]).values()},
        }
        return _listed(names, incomplete) if many else items(names, incomplete)

    return _completer(offer)


def _listed(names: Mapping[str, str], incomplete: str) -> Items:
    """Return completions of the last name in a list separated by commas. Names already in the list are left out."""
    before, comma, last = incomplete.rpartition(",")
    given = before.split(",")
    return items({name: text for name, text in names.items() if name not in given}, last, before + comma)


def _backends(incomplete: str) -> Items:
    """Return completions of the setting ``backend``: a transport's name, or two names in the form LOCAL+CROSS.

    Three kinds of transports are left out, because a user cannot choose them by this setting: those between the threads
    of one process, those that are composed of other transports, and those with a limited number of ranks.
    """
    registry = installed()
    if registry is None:
        return []
    before, plus, last = incomplete.rpartition("+")
    names = {
        one.name: one.doc
        for one in registry.transports.values()
        if not one.in_process and not one.composes and one.sizes[1] is None and one.name != before
    }
    return items(names if plus else {"auto": "the fastest that can be used", **names}, last, before + plus)


def _devices(incomplete: str) -> Items:
    """Return completions of the setting ``device_dense``, which chooses how tensors on accelerators are reduced.

    The words are "auto", "cpu", and the transports that support an accelerator.
    """
    registry = installed()
    if registry is None:
        return []
    serving = {one.name: one.doc for one in registry.transports.values() if set(one.devices) - {"cpu"}}
    return items({"auto": "", "cpu": "staged in host memory", **serving}, incomplete)


def _plugins(incomplete: str) -> Items:
    """Return completions of the names of all installed plugins, including the plugins that are not in use."""
    registry = installed()
    if registry is None:
        return []
    names = registry.distributions() | {one.origin.name for one in registry.refusals}
    return _listed(dict.fromkeys(sorted(names - {"ddlcore"}), ""), incomplete)


backends = _completer(_backends)
devices = _completer(_devices)
plugins = _completer(_plugins)
files = _completer(path)
directories = _completer(lambda incomplete: path(incomplete, "dir"))


def script(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Return completions for the command of the ranks.

    The first word is completed to a Python file, a directory, or ``python``. Every later word is completed to any file.
    """
    if follows_command(ctx):
        return path(incomplete)
    folder, slash, start = incomplete.rpartition("/")
    try:
        found = sorted(Path(folder + slash or ".").expanduser().iterdir())
    except (OSError, RuntimeError):  # no such directory, no such user
        return []
    hidden = start.startswith(".")
    matching = [one for one in found if one.name.startswith(start) and (hidden or not one.name.startswith("."))]
    inner = [one.name for one in matching if one.is_dir()]
    scripts = [one.name for one in matching if one.suffix == ".py" and one.is_file()]
    programs = ["python"] if not slash and "python".startswith(start) else []
    if not scripts and not programs:
        # The shell itself continues after the slash of a directory. It would end the word after one of our names.
        return path(incomplete, "dir")
    return items([*scripts, *(f"{name}/" for name in inner), *programs], start, folder + slash)
