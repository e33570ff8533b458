"""Collect the facts that ``ddl info`` shows, as plain data.

Imports no framework. The only code that it imports from plugins are the functions that look for the plugins'
libraries.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
from typing import Any

from ddlcore.api import installed_gpus, visible_gpus
from ddlcore.config.loading import Settings
from ddlcore.hooks import Provider
from ddlcore.launch.ranks.environment import usable_cores
from ddlcore.plug.aliases import ALIASES, FRAMEWORKS
from ddlcore.plug.registry import PluginKind, Registry
from ddlcore.plug.tested import library_releases
from ddlcore.runtime.routes import choose_route
from ddlcore.text.installing import pip_install
from ddlcore.text.numbers import memory_size
from ddlcore.types import Member
from ddlcore.version import VERSION

Row = dict[str, str]

UNKNOWN = "unknown version"
_SHOWN = (
    "transports",
    "adapters",
    "fusion_policies",
    "compressors",
    "kernels",
    "communicators",
    "bench_peers",
    "commands",
    "watches",
)


def machine_facts() -> Row:
    """Return facts about this machine, such as its name, cores, memory and GPUs."""
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "memory": _memory(),
        "gpus": _gpus(),
        "python": f"{platform.python_version()} ({sys.executable})",
    }


def _memory() -> str:
    try:
        return memory_size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return "unknown"


def _gpus() -> str:
    gpus = installed_gpus()
    visible = visible_gpus(gpus, os.environ)
    if visible == len(gpus.uuids) and not gpus.parts:
        return str(gpus)
    return f"{gpus}; a process sees {visible} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})"


def framework_facts(registry: Registry) -> list[Row]:
    """Return a row for each library that ddl knows or a plugin depends on: its version, or the command that installs it.

    The row also tells the releases that the plugins were tested with. The libraries are not imported.
    """
    rows = []
    for library in library_releases(registry, FRAMEWORKS):
        name, there = library.module, _findable(library.module)
        rows.append(
            {
                "name": name,
                "version": (library.version or UNKNOWN) if there else "-",
                "tested": library.range or "-",
                "state": (library.differs or "installed") if there else "not installed",
                "missing": "" if there else f"pip install {FRAMEWORKS.get(name, (name,))[0]}",
            }
        )
    return rows


def _findable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _provider_facts(registry: Registry, kind: PluginKind[Any]) -> list[Row]:
    rows = []
    providers = registry.of(kind)
    for provider in providers.values():
        missing = registry.missing(provider)
        name, version = registry.distribution(provider)
        state = "ready" if not missing else "not usable"
        rows.append(
            {
                "name": provider.name,
                "from": f"{name} {version}",
                "state": state,
                "missing": missing,
                "what": _what(registry, provider),
            }
        )
    for name, plugin in ALIASES.get(kind.word, {}).items():
        off = registry.off(plugin)
        if name not in providers and (off or not _is_installed(plugin)):  # else it has another name here
            state, missing = ("off", off) if off else ("not installed", pip_install(plugin))
            rows.append({"name": name, "from": "-", "state": state, "missing": missing, "what": ""})
    return rows


def _what(registry: Registry, provider: Provider) -> str:
    library = registry.library(provider)
    if library is None:
        return provider.doc
    facts = ", ".join(f"{name} {value}".strip() for name, value in library.facts.items())
    return f"{provider.doc}: {library.name}" + (f" ({facts})" if facts else "")


def _launcher_facts(registry: Registry) -> list[Row]:
    """Return a row for each way to start ranks: ``ddl run``, ``ddlcore.run``, and the launchers of the registry."""
    origin = f"ddlcore {VERSION}"
    return [
        {"name": "ddl run", "from": origin, "state": "ready", "missing": "", "what": "processes of this host"},
        {
            "name": "ddlcore.run",
            "from": origin,
            "state": "ready",
            "missing": "",
            "what": "a function on processes of this host",
        },
        *_provider_facts(registry, Registry.launchers),
    ]


def _route_facts(registry: Registry, backend: str) -> list[Row]:
    rows = []
    for where, hosts in (("one rank", (0,)), ("one host", (0, 0)), ("two hosts", (0, 0, 1, 1))):
        members = [Member(rank, host) for rank, host in enumerate(hosts)]
        try:
            route = choose_route(backend, members, registry)
            rows.append({"where": where, "transport": route.name, "why": route.reason})
        except (RuntimeError, ValueError) as error:
            rows.append({"where": where, "transport": "none", "why": str(error)})
    return rows


def all_facts(settings: Settings, registry: Registry) -> dict[str, Any]:
    """Return all facts that ``ddl info`` shows, as a dict that can be written as JSON."""
    kinds = registry.kinds()
    return {
        "ddlcore": VERSION,
        "machine": machine_facts(),
        "frameworks": framework_facts(registry),
        **{name.replace("_", " "): _provider_facts(registry, kinds[name]) for name in _SHOWN},
        "launchers": _launcher_facts(registry),
        "route": _route_facts(registry, settings.text("backend")),
        "problems": list(registry.problems),
    }
