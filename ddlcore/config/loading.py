"""Decide which source of a setting's value has priority.

A flag has priority over the environment, the environment over the config file, and the config file over the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ddlcore.config.file import where_in
from ddlcore.config.setting import Setting
from ddlcore.config.table import SETTINGS
from ddlcore.text.nearest import nearest
from ddlcore.types import Value


class Settings(Mapping[str, Value]):
    """The settings of one job, as an immutable mapping: ``settings["fusion_bytes"]``."""

    def __init__(self, values: Mapping[str, Value], sources: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._sources = dict(sources)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def source(self, name: str) -> str:
        """Return the source of the value of the setting ``name``: "flag", "env", "file", "default" or "tuner".

        The source is "tuner" if a search for better settings has chosen the value.
        """
        return self._sources[name]

    def text(self, name: str) -> str:
        return str(self._values[name])

    def number(self, name: str) -> float:
        value = self._values[name]
        assert not isinstance(value, str), name
        return float(value)

    def whole(self, name: str) -> int:
        value = self._values[name]
        assert isinstance(value, int), name
        return value

    def overlaps(self, hosts: int) -> bool:
        """Return whether buckets in host memory are reduced while the step still computes. ``hosts``: number of hosts.

        If the setting ``overlap`` is "auto", the result is true in two cases: there is more than one host, or the user
        has set a bucket size. On a single host, buckets that run during the computation take processor cores from the
        computation, and there is too little communication to make up for this. Raises ValueError for an unknown value
        of ``overlap``.
        """
        wanted = self.text("overlap")
        if wanted not in ("auto", "on", "off"):
            raise ValueError(f"overlap={wanted!r} is not one of auto, on, off")
        chosen = any(self._sources[name] != "default" for name in ("fusion_bytes", "first_bucket_bytes"))
        return wanted == "on" or (wanted == "auto" and (hosts > 1 or chosen))

    def changed(self, values: Mapping[str, Value], source: str = "tuner") -> Settings:
        """Return a copy of these settings in which ``values`` replace the old values. They come from ``source``."""
        return Settings({**self._values, **values}, {**self._sources, **dict.fromkeys(values, source)})

    def names(self, name: str) -> tuple[str, ...]:
        """Return the parts of the comma-separated value of the setting ``name``, without empty parts."""
        return tuple(part.strip() for part in self.text(name).split(",") if part.strip())


def load_settings(
    environ: Mapping[str, str],
    file: Mapping[str, object] | None = None,
    flags: Mapping[str, object] | None = None,
    rows: Iterable[Setting] = SETTINGS,
) -> Settings:
    """Return the settings of one job, read from the environment, the config file and the flags.

    ``file``: the keys and values of the config file. ``flags``: the values of the flags, by the name of the setting; a
    value of None means that the flag was not given. ``rows``: the table of settings, which is the core's table or
    contains plugins' settings, too. Raises ValueError if a value is not valid. Raises UnknownSetting, a ValueError, if
    ``file`` or ``flags`` contains a name that is not in the table. The error message names the variable, the flag, or
    the key with its file and line.
    """
    table = {row.name: row for row in rows}
    file = file or {}
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    unknown = [_unknown(where_in(file, name), name, table) for name in sorted(set(file) - set(table))]
    unknown += [_unknown(f"--{name.replace('_', '-')}", name, table) for name in sorted(set(flags) - set(table))]
    if unknown:
        raise UnknownSetting("; ".join(unknown))
    values: dict[str, Value] = {}
    sources: dict[str, str] = {}
    for name, row in table.items():
        if name in flags:
            values[name], sources[name] = row.parse(flags[name], row.flag), "flag"
        elif row.env in environ:
            values[name], sources[name] = row.parse(environ[row.env], row.env), "env"
        elif name in file:
            values[name], sources[name] = row.parse(file[name], where_in(file, name)), "file"
        else:
            values[name], sources[name] = row.default, "default"
    return Settings(values, sources)


class UnknownSetting(ValueError):
    """Raised if the name of a flag or a key of a config file is not the name of a setting."""


def _unknown(where: str, name: str, table: Iterable[str]) -> str:
    near = nearest(name, table)
    what_next = f"did you mean {near}?" if near else f"there are {', '.join(sorted(table))}"
    return f"{where}: no setting is called {name}; {what_next}"
