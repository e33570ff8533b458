"""List what is installed at each extension point, with its state and the reason. Does not import what plugins offer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddlcore.hooks import LauncherProvider, Provider
from ddlcore.plug import Registry

READY, UNUSABLE, REFUSED, OFF = "ready", "not usable", "refused", "off"


@dataclass(frozen=True)
class Row:
    """A row of the list: one provider, or a plugin that is refused or switched off as a whole."""

    name: str
    distribution: str
    version: str
    kind: str  # in words; "-": the plugin as a whole is not in use
    state: str
    reason: str = ""
    provider: Provider | None = None

    def told(self, state: str, reason: str) -> Row:
        """Return a copy of the row with another state and reason."""
        return replace(self, state=state, reason=reason)

    def facts(self) -> dict[str, str]:
        """Return the row's texts by column, for a table or for JSON."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "kind": self.kind,
            "state": self.state,
            "reason": self.reason,
        }


def rows(registry: Registry, environ: Mapping[str, str] = os.environ) -> list[Row]:
    """Return a row for each provider, in the order of the plugin kinds, and then one for everything refused or off."""
    found = []
    for kind, provider in registry.offers():
        name, version = registry.distribution(provider)
        missing = registry.missing(provider)
        state = UNUSABLE if missing else READY
        found.append(Row(provider.name, name, version, kind, state, missing or _waits_for(provider, environ), provider))
    for refusal in registry.refusals:
        state = OFF if refusal.off else REFUSED
        found.append(Row(refusal.name, *refusal.origin, refusal.kind or "-", state, refusal.reason))
    return found


def _waits_for(provider: Provider, environ: Mapping[str, str]) -> str:
    """Return, in words, the unset variables without which a launcher is not chosen automatically.

    The launcher can be used by name even so. The result is empty if there are no such variables, and for other
    providers.
    """
    if not isinstance(provider, LauncherProvider):
        return ""
    absent = [name for name in provider.variables if name not in environ]
    return f"applies where {', '.join(absent)} is set" if absent else ""
