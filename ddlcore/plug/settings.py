"""Return the settings of a job, including those that its plugins define."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlcore.config import SETTINGS, Setting, Settings, load_settings
from ddlcore.plug.loader import load_plugins
from ddlcore.plug.registry import Registry


def settings_of(
    environ: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
    file: Mapping[str, object] | None = None,
    registry: Registry | None = None,
) -> tuple[Settings, Registry]:
    """Return the settings and the plugins of this process.

    ``environ``, ``file`` and ``flags`` are the sources of the settings. The settings that say which plugins to load are
    read first. All settings are read after that, since plugins define settings of their own. ``registry``: the plugins,
    if they have been loaded already.
    """
    if registry is None:
        registry = load_plugins(load_settings(environ, _known(file, SETTINGS), _known(flags, SETTINGS)))
    rows: list[Setting] = list(SETTINGS)
    for _, provider in registry.offers():
        rows += provider.settings
    return load_settings(environ, file, flags, rows), registry


def _known(flags: Mapping[str, object] | None, rows: Sequence[Setting]) -> dict[str, object]:
    names = {row.name for row in rows}
    return {name: value for name, value in (flags or {}).items() if name in names}
