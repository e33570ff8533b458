"""List everything that plugins add to ddl, with its state and the reason for the state.

Does not import the classes and functions that the plugins offer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddlcore.hooks import LauncherProvider, Provider
from ddlcore.plug import Registry
from ddlcore.text.columns import table

READY, UNUSABLE, REFUSED, OFF = "ready", "not usable", "refused", "off"


@dataclass(frozen=True)
class Row:
    """A row of the list: one thing that a plugin adds, or a whole plugin that is refused or switched off."""

    name: str
    distribution: str
    version: str
    kind: str  # the plugin kind in words; "-": the whole plugin is not in use
    state: str
    reason: str = ""
    provider: Provider | None = None

    def told(self, state: str, reason: str) -> Row:
        """Return a copy of the row with the state and reason that are given."""
        return replace(self, state=state, reason=reason)

    def facts(self) -> dict[str, str]:
        """Return the texts of the row by name of the column, for a table or for JSON."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "kind": self.kind,
            "state": self.state,
            "reason": self.reason,
        }


def rows(registry: Registry, environ: Mapping[str, str] = os.environ) -> list[Row]:
    """Return all rows of the list: first the things that plugins add, in the order of the plugin kinds.

    Then come the rows for everything that is refused or switched off. ``environ`` holds the environment variables.
    """
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


def shown(registry: Registry, found: Sequence[Row] | None = None, *, for_machines: bool = False) -> str:
    """Return the list ``found``, or that of ``registry``, as a table for people, or as JSON ``for_machines``."""
    found = rows(registry) if found is None else found
    if for_machines:
        return json.dumps({"plugins": [row.facts() for row in found], "problems": registry.problems}, indent=2)
    return "\n".join([*table([row.facts() for row in found]), *_problems(registry.problems, found)])


def _problems(problems: Sequence[str], found: Sequence[Row]) -> list[str]:
    """Return an empty line and the problems that no row in ``found`` has as its reason; [] if there are no such problems."""
    rest = [problem for problem in problems if not any(row.reason and row.reason in problem for row in found)]
    return ["", *rest] if rest else []


def _waits_for(provider: Provider, environ: Mapping[str, str]) -> str:
    """Return a text that names variables which must be set before ddl chooses this launcher automatically.

    ``provider`` describes the launcher. The text names only environment variables that are not set now. It is empty if
    none is missing, or if ``provider`` does not describe a launcher. Even without these variables, a user can choose
    the launcher by its name.
    """
    if not isinstance(provider, LauncherProvider):
        return ""
    absent = [name for name in provider.variables if name not in environ]
    return f"applies where {', '.join(absent)} is set" if absent else ""
