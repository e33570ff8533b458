"""Reads the config files of horovodrun, which are written in YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

# For each section of the file, the start of the flags that its keys stand for.
_SECTIONS: Mapping[str, str] = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall_check": "stall-check-",
    "library_options": "",
    "logging": "log-",
}
_ON_OR_OFF: Mapping[str, tuple[str, str]] = {  # the flags of a key whose value is true or false
    "hierarchical-allreduce": ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
    "hierarchical-allgather": ("--hierarchical-allgather", "--no-hierarchical-allgather"),
    "torus-allreduce": ("--torus-allreduce", "--no-torus-allreduce"),
    "autotune-enabled": ("--autotune", "--no-autotune"),
    "timeline-mark-cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    "stall-check-enabled": ("--stall-check", "--no-stall-check"),
    "mpi-threads-disable": ("--mpi-threads-disable", "--no-mpi-threads-disable"),
    "log-with-timestamp": ("--log-with-timestamp", "--log-without-timestamp"),
    "log-hide-timestamp": ("--log-hide-timestamp", "--no-log-hide-timestamp"),
}


def flags_in(path: str) -> list[tuple[str, str]]:
    """Return the flags of horovodrun that the file at ``path`` stands for, each with its value ("": it takes none).

    Raises ValueError, with a message of one line, if the file cannot be read or has another form.
    """
    try:
        read = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except OSError as error:
        raise ValueError(f"config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config file {path}: {' '.join(str(error).split())}") from None
    return list(_flags(path, _mapping(path, "", read)))


def _flags(path: str, read: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    controller = str(read.get("controller") or "").lower()
    if controller not in ("", "gloo", "mpi"):
        raise ValueError(f"config file {path}: controller: {controller} is none of gloo, mpi")
    if controller:
        yield f"--{controller}", ""
    for section, start in _SECTIONS.items():
        for key, value in _mapping(path, section, read.get(section) or {}).items():
            name = start + str(key).replace("_", "-")
            if value is None:
                continue
            if name in _ON_OR_OFF:
                if not isinstance(value, bool):
                    raise ValueError(f"config file {path}: {section}: {key}: {value!r} is neither true nor false")
                yield _ON_OR_OFF[name][not value], ""
            else:
                yield f"--{name}", str(value)


def _mapping(path: str, section: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"config file {path}: {section or 'the file'} must have lines of the form NAME: VALUE")
    return value
