"""The extension points: base classes and data types for plugins that add transports, adapters, launchers and more."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.cluster import Cluster, RankInfo, Surroundings
from ddlcore.contracts.communicators import Communicators
from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.device import DeviceRuntime, Event, Queue
from ddlcore.contracts.discovery import HostDiscovery
from ddlcore.contracts.framework import (
    Companion,
    JobService,
    JobSettings,
    PersistentRequest,
    RequestStart,
    TensorEntry,
)
from ddlcore.contracts.fusion import FusionPolicy, Ready
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.launcher import AgentPlace, HostSlots, Launcher, StartCommand, StartPlan
from ddlcore.contracts.library import Library, installed_version, version_numbers
from ddlcore.contracts.store import Store
from ddlcore.contracts.transport import DONE, Capabilities, Context, Memory, Plan, Prepared, Transport, Work
from ddlcore.contracts.tuner import Knob, Tuner
from ddlcore.text.installing import pip_install

if TYPE_CHECKING:
    from ddlcore.contracts.bench import BenchPeer
    from ddlcore.contracts.check import Check, Finding, HostView, Matrix, Seen

__all__ = [
    "API_VERSION",
    "DONE",
    "Adapter",
    "AgentPlace",
    "BenchPeer",
    "Capabilities",
    "Check",
    "Cluster",
    "Communicators",
    "Companion",
    "Compressor",
    "Context",
    "DeviceRuntime",
    "Event",
    "Finding",
    "FusionPolicy",
    "HostDiscovery",
    "HostSlots",
    "HostView",
    "JobService",
    "JobSettings",
    "Kernels",
    "Knob",
    "Launcher",
    "Library",
    "Matrix",
    "Memory",
    "PersistentRequest",
    "Plan",
    "Prepared",
    "Queue",
    "RankInfo",
    "Ready",
    "RequestStart",
    "Seen",
    "StartCommand",
    "StartPlan",
    "Store",
    "Surroundings",
    "TensorEntry",
    "Transport",
    "Tuner",
    "Work",
    "installed_version",
    "pip_install",
    "version_numbers",
]

API_VERSION = (2, 0)  # plugins built for another major version are refused; docs/plugins.md lists what changed

# What no rank needs: imported at its first use.
_LATE = {"BenchPeer": "bench", **dict.fromkeys(("Check", "Finding", "HostView", "Matrix", "Seen"), "check")}


if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Return one of the names in ``_LATE``."""
        if name in _LATE:
            return getattr(import_module(f"ddlcore.contracts.{_LATE[name]}"), name)
        raise AttributeError(f"module 'ddlcore.contracts' has no attribute {name!r}")
