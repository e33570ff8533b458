"""Write the help of a command, with the options in groups.

--help shows the options for everyday use, and --help-all shows all options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from ddlcore.config.setting import GROUPS

_COLUMN = 32  # greatest width of the column of names: if an option's names are longer, its text begins on the next line
_WHOLE = "ddl.whole_help"  # in click's context
HELP_NAMES = ["-h", "--help"]


class Group(NamedTuple):
    """A group of options in a help text.

    Groups are shown in the order of ``place``. Groups with equal ``place`` are shown in the order of their first
    options.
    """

    title: str
    doc: str = ""
    place: int = 0


OPTIONS = Group("Options")  # of a command that needs no other group
CORE: Mapping[str, Group] = {
    name: Group(name.capitalize(), doc, place) for place, (name, doc) in enumerate(GROUPS.items(), 1)
}
PLUGINS_PLACE = len(CORE) + 1
HELP = Group("Help", "this page, and more of it", PLUGINS_PLACE + 1)


class Option(click.Option):
    """An option of a command, with its group in the help and a short text.

    ``brief`` is the option's text in the short help. If ``brief`` is empty, only --help-all shows the option. ``help``
    is the option's text for --help-all. If ``help`` is empty, --help-all shows ``brief``. If ``bare`` is not empty, the
    value of the option may be left out, and is ``bare`` then; ``form`` is a regular expression of all values.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        group: Group = OPTIONS,
        brief: str = "",
        help: str = "",
        bare: str = "",
        form: str = "",
        **rest: Any,
    ) -> None:
        super().__init__(names, help=help or brief, **rest)
        self.group = group
        self.brief = brief
        self.bare = bare
        self._form = form

    def is_value(self, word: str) -> bool:
        """Return whether ``word``, the next word on the command line, is the value of this option."""
        return word == self.bare or re.fullmatch(self._form, word) is not None


def option(*names: str, group: Group, **rest: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds an ``Option`` to a command. ``rest`` holds further arguments of ``Option``."""
    return click.option(*names, cls=Option, group=group, **rest)


def examples(*rows: tuple[str, str]) -> str:
    """Return the last part of a help text: one line for each example. A row is a command and its description."""
    width = max(len(command) for command, _ in rows)
    # click wraps a paragraph again unless its first line is this character.
    return "\n".join(["\b", "Examples:", *(f"  {command:<{width}}  {what}" for command, what in rows)])


class Command(click.Command):
    """A click command whose help shows its options in groups.

    If the short help leaves out some options of the command, the command also has the option ``--help-all``.
    """

    def __init__(self, *given: Any, **rest: Any) -> None:
        super().__init__(*given, **rest)
        # click creates the option --help only once, in the first context of this command. That context may have no
        # parent `ddl`, so the names are set here, too.
        self.context_settings.setdefault("help_option_names", HELP_NAMES)
        if any(isinstance(one, Option) and not one.hidden and not one.brief for one in self.params):
            self.params.append(
                Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_whole,
                    group=HELP,
                    brief="Show all options, with those of plugins, and exit.",
                )
            )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups of options into ``formatter``, each group below its title."""
        whole = shows_whole(ctx)
        shown = [one for one in self.get_params(ctx) if isinstance(one, click.Option) and not one.hidden]
        grouped = any(isinstance(one, Option) and one.group != OPTIONS for one in shown)
        groups: dict[Group, list[tuple[str, str]]] = {}
        for one in shown:
            record = one.get_help_record(ctx) if whole else _brief_record(ctx, one)
            if record is not None:
                group = one.group if isinstance(one, Option) else HELP if grouped else OPTIONS
                groups.setdefault(group, []).append(record)
        # The texts of all groups begin in one column.
        width = min(_COLUMN, max(len(names) for rows in groups.values() for names, _ in rows))
        for group in sorted(groups, key=lambda group: group.place):
            formatter.write_paragraph()
            formatter.write(f"{group.title}: {group.doc}".rstrip() + "\n")
            with formatter.indentation():
                formatter.write_dl([(names.ljust(width), text) for names, text in groups[group]], col_max=width)


def shows_whole(ctx: click.Context) -> bool:
    """Return whether the help that is being written shows all options."""
    return bool(ctx.meta.get(_WHOLE))


def _show_whole(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_WHOLE] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _brief_record(ctx: click.Context, option: click.Option) -> tuple[str, str] | None:
    """Return the names and the text of an option for the short help, or None if the short help leaves it out.

    At most two names are shown: the first name of at most three characters, such as -np, and the first name that begins
    with two dashes.
    """
    if not isinstance(option, Option):
        return option.get_help_record(ctx)  # click's own --help, and options of small commands
    if not option.brief:
        return None
    names = [*_first(name for name in option.opts if len(name) <= 3), *_first(_long(option.opts))]
    text = ", ".join(names)
    if option.secondary_opts:
        text += f" / {option.secondary_opts[0]}"
    elif not option.is_flag and option.metavar:
        text += f" {option.metavar}"
    return text, option.brief


def _long(names: Sequence[str]) -> Iterable[str]:
    return (name for name in names if name.startswith("--"))


def _first(names: Iterable[str]) -> list[str]:
    return list(names)[:1]
