"""Return the settings of a job, including those that its plugins define."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from ddlcore.config.file import ConfigFile
from ddlcore.config.loading import Settings, UnknownSetting, load_settings
from ddlcore.config.setting import Setting
from ddlcore.config.table import NOT_SETTINGS, SETTINGS
from ddlcore.plug.aliases import ALIASES
from ddlcore.plug.loader import load_plugins
from ddlcore.plug.registry import Registry
from ddlcore.text.installing import pip_install
from ddlcore.text.nearest import nearest

_LIKE = 0.88  # about two wrong letters in ten. With a lower value, variables of other programs would look misspelt
_JOB = "DDL_JOB_FILE"  # set for ranks, whose launcher has already warned of the misspelt variables


def settings_of(
    environ: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
    file: Mapping[str, object] | None = None,
    registry: Registry | None = None,
    *,
    warns: bool = True,
) -> tuple[Settings, Registry]:
    """Return the settings and the plugins of this process.

    ``environ``, ``file`` and ``flags`` are the sources of the settings: environment variables, the config file and the
    flags. The settings that say which plugins to load are read first. All settings are read after loading the plugins,
    because plugins define additional settings. ``registry`` has the plugins if they were loaded before; None means to
    load them now.

    ``warns`` says whether to warn of misspelt variables. Pass False in a process that may be one of many ranks, so that
    not every rank warns. There is also no warning if ``registry`` is given, because the user was warned before. The
    ranks of ``ddl run`` do not warn either, because ``ddl run`` warns before it starts them.

    Raises ValueError if a value is not valid, and UnknownSetting (a ValueError) if ``file`` or ``flags`` contain the
    name of a setting that does not exist. The message of UnknownSetting names the package of ddl that has the setting; if
    none has it, the message names the plugins that the user's allow or deny list excludes, because it may be one's.
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
        absent = [
            f"{name}: {line}" for name in {**(file or {}), **(flags or {})} if (line := absent_setting(name, registry))
        ]
        off = [f"{one.origin} is off: {one.reason}" for one in registry.refusals if one.off]
        raise UnknownSetting("; ".join(absent or [str(error), *off])) from None


def absent_setting(name: str, registry: Registry) -> str:
    """Return why the setting ``name`` is missing, and what to do. Return "" if it is there, or unknown to the core."""
    plugin = ALIASES["setting"].get(name, "")
    if not plugin or any(row.name == name for row in _rows(registry)):
        return ""
    return registry.off(plugin) or f"install it: {pip_install(plugin)}"


def warn_of_misspelt(environ: Mapping[str, str], registry: Registry) -> None:
    """Warn of each variable in ``environ`` that is not a setting of the core or of a plugin, but has a similar name.

    This is not an error, because the variable may belong to another version of ddl or to a program of the user.
    """
    absent = [(f"DDL_{name.upper()}", absent_setting(name, registry)) for name in ALIASES["setting"]]
    lines = [f"{name} has no effect here; {line}" for name, line in absent if line and environ.get(name)]
    for line in [*lines, *misspelt_variables(environ, _rows(registry))]:
        warnings.warn(line, stacklevel=3)


def _rows(registry: Registry) -> list[Setting]:
    return [*SETTINGS, *(row for _, provider in registry.offers() for row in provider.settings)]


def misspelt_variables(environ: Mapping[str, str], rows: Iterable[Setting]) -> list[str]:
    """Return one line of text for each variable in ``environ`` that is not a setting but has a similar name.

    ``rows`` has the settings of the core and of the loaded plugins. If a known plugin is not loaded, variables with the
    prefix of this plugin are left out, because they may be correct.
    """
    rows = list(rows)
    known = {*(row.env for row in rows), *(f"DDL_{name.upper()}" for name in ALIASES["setting"])}
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
