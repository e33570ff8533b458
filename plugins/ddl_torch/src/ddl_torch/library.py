"""Tells which torch is installed, and whether it finds the backend ``ddl`` of torch.distributed. Imports no torch."""

from __future__ import annotations

from importlib.metadata import entry_points

from ddlcore.contracts.library import Library, installed_version, version_numbers

_OLDEST = (2, 10)

_GROUP, _NAME = "torch.backends", "ddl"  # of the entry points that torch loads when it is imported


def library() -> Library:
    """Return the description of the installed torch, with the state of the backend in its facts."""
    installed = installed_version("torch")
    numbers = version_numbers(installed, 3)
    found = any(entry.name == _NAME for entry in entry_points(group=_GROUP))
    state = 'init_process_group("ddl")' if found else "no backend ddl, because ddl-torch is not installed as a package"
    code = sum(number * weight for number, weight in zip(numbers, (10000, 100, 1)))
    return Library(f"torch {installed}", code, {"torch.distributed:": state})


def objection() -> str:
    """Return why this package does not run with the installed torch, or "" if it does or if its version is not known."""
    installed = installed_version("torch")
    if not installed or version_numbers(installed) >= _OLDEST:
        return ""
    return f"ddl_torch runs with torch 2.10 or later; version {installed} is installed: pip install 'torch>=2.10'"
