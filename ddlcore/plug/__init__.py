"""Find out at start-up which plugins are installed and which providers each plugin offers."""

from ddlcore.plug.aliases import ALIASES
from ddlcore.plug.loader import load_plugins
from ddlcore.plug.registry import Distribution, PluginKind, Refusal, Registry

__all__ = ["ALIASES", "Distribution", "PluginKind", "Refusal", "Registry", "load_plugins"]
