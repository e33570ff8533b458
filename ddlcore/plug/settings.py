"""Return the settings of a job, including those that its plugins define."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from ddlcore.config import NOT_SETTINGS, SETTINGS, ConfigFile, Setting, Settings, UnknownSetting, load_settings
from ddlcore.plug.aliases import ALIASES
from ddlcore.plug.loader import load_plugins
from ddlcore.plug.registry import Registry
from ddlcore.text.nearest import nearest

_LIKE = 0.88  # two wrong letters in ten or so: less, and a variable of somebody else would be taken for ours
_JOB = "DDL_JOB_FILE"  # set for ranks, whose launcher has named the misspelt variables


def settings_of(
    environ: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
    file: Mapping[str, object] | None = None,
    registry: Registry | None = None,
    *,
    warns: bool = True,
) -> tuple[Settings, Registry]:
    """Return the settings and the plugins of this process.

    ``environ``, ``file`` and ``flags`` are the sources of the settings. The settings that say which plugins to load are
    read first. All settings are read after that, since plugins define settings of their own. ``registry``: the plugins,
    if they have been loaded already. ``warns``: whether to warn of misspelt variables. A process that may be one of
    many ranks must not, because one rank is enough. Nobody is warned twice: not if ``registry`` is given, nor in a rank
    of ``ddl run``, which has warned before it started the ranks.

    Raises ValueError as ``load_settings`` does. If a name is unknown, the message also names the plugins that the
    user's own lists leave out, because the setting may be one of theirs.
    """
    warns = warns and registry is None and _JOB not in environ
    if registry is None:
        names = [row.name for row in SETTINGS]
        known = file.only(names) if isinstance(file, ConfigFile) else _known(file, SETTINGS)
        registry = load_plugins(load_settings(environ, known, _known(flags, SETTINGS)))
    if warns:
        warn_of_misspelt(environ, registry)
    try:
        return load_settings(environ, file, flags, _rows(registry)), registry
    except UnknownSetting as error:
        off = [f"{one.origin} is off: {one.reason}" for one in registry.refusals if one.off]
        raise UnknownSetting("; ".join([str(error), *off])) from None


def warn_of_misspelt(environ: Mapping[str, str], registry: Registry) -> None:
    """Warn of each variable in ``environ`` that is no setting of the core or of a plugin, but resembles one.

    It is no error: the variable may be one of another version, or of a program of the user.
    """
    for line in misspelt_variables(environ, _rows(registry)):
        warnings.warn(line, stacklevel=3)


def _rows(registry: Registry) -> list[Setting]:
    return [*SETTINGS, *(row for _, provider in registry.offers() for row in provider.settings)]


def misspelt_variables(environ: Mapping[str, str], rows: Iterable[Setting]) -> list[str]:
    """Return a line for each variable in ``environ`` that is no setting but resembles one.

    ``rows``: the settings of the core and of the loaded plugins. The variables of a known plugin that is not loaded are
    left out, since they may be right.
    """
    rows = list(rows)
    known = {row.env for row in rows} | {f"DDL_{row.former.upper()}" for row in rows if row.former}
    absent = {
        prefix
        for names in ALIASES.values()
        for plugin in names.values()
        if not any(one.startswith(prefix := f"DDL_{plugin.removeprefix('ddl-').upper()}_") for one in known)
    }
    return [
        f"{name} is no setting and has no effect; did you mean {near}?"
        for name in sorted(environ)
        if name.startswith("DDL_") and name not in known and name not in NOT_SETTINGS
        if not name.startswith(tuple(absent)) and (near := nearest(name, known, _LIKE))
    ]


def _known(flags: Mapping[str, object] | None, rows: Sequence[Setting]) -> dict[str, object]:
    names = {row.name for row in rows}
    return {name: value for name, value in (flags or {}).items() if name in names}
