"""Errors under Horovod's names."""

from __future__ import annotations

from ddlcore.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return a text that says that the framework ``name`` has another version than the one it was built for."""
    return f"framework {name} has version {version}, and was installed with version {installed_version}"


class HorovodVersionMismatchError(ImportError):
    """Never raised here, because nothing is compiled for a version of a framework. Scripts may catch it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
