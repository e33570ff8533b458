"""Read the config file, and remember on which line each key is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


class ConfigFile(dict[str, object]):
    """The keys and values of a config file. ``where(key)`` returns the file and line of a key, for messages."""

    def __init__(self, values: Mapping[str, object], path: str | Path, text: str) -> None:
        super().__init__(values)
        self._path = path
        self._lines = text.splitlines()

    def only(self, names: Iterable[str]) -> ConfigFile:
        """Return a copy that contains only those keys that are in ``names``."""
        return ConfigFile({name: self[name] for name in names if name in self}, self._path, "\n".join(self._lines))

    def where(self, key: str) -> str:
        """Return the place of ``key`` as "FILE:LINE", or as "FILE" if no line of the file begins with ``key``."""
        for number, line in enumerate(self._lines, 1):
            if line.partition("=")[0].strip().strip("'\"") == key:
                return f"{self._path}:{number}"
        return str(self._path)


def where_in(file: Mapping[str, object], key: str) -> str:
    """Return the text by which messages name the place of ``key`` in a config file.

    ``file`` contains the keys and values of that config file.
    """
    return file.where(key) if isinstance(file, ConfigFile) else f"config file, {key}"


def read_toml(path: str | Path) -> ConfigFile:
    """Return the keys and values of the config file at ``path``.

    Raises ValueError with a message of one line if the file cannot be read or is not valid TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = Path(path).read_text("utf-8")
        return ConfigFile(tomllib.loads(text), path, text)
    except OSError as error:
        raise ValueError(f"config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"config file {path}: it is not encoded in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        if str(path).endswith((".yaml", ".yml")):
            raise ValueError(
                f"config file {path}: YAML is for horovodrun; write settings as TOML, NAME = VALUE"
            ) from None
        raise ValueError(f"config file {path}: {error}") from None
