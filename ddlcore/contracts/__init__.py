"""The doors: what a transport, adapter, fusion policy, compressor, launcher, bench peer, kernel set or store must be."""

from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.fusion import FusionPolicy, Ready
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.launcher import AgentPlace, HostSlots, Launcher, StartCommand, StartPlan
from ddlcore.contracts.store import Store
from ddlcore.contracts.transport import DONE, Capabilities, Context, Memory, Plan, Prepared, Transport, Work

__all__ = [
    "API_VERSION",
    "DONE",
    "Adapter",
    "AgentPlace",
    "BenchPeer",
    "Capabilities",
    "Compressor",
    "Context",
    "FusionPolicy",
    "HostSlots",
    "Kernels",
    "Launcher",
    "Memory",
    "Plan",
    "Prepared",
    "Ready",
    "StartCommand",
    "StartPlan",
    "Store",
    "Transport",
    "Work",
]

API_VERSION = (1, 0)  # a plugin built for another major version is refused
