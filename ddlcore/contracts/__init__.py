"""The doors: transport, adapter, cluster, fusion policy, compressor, launcher, bench peer, kernels, store; what each must be."""

from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.cluster import Cluster, Seat, Surroundings
from ddlcore.contracts.communicators import Communicators
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
    "Cluster",
    "Communicators",
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
    "Seat",
    "StartCommand",
    "StartPlan",
    "Store",
    "Surroundings",
    "Transport",
    "Work",
]

API_VERSION = (1, 0)  # a plugin built for another major version is refused
