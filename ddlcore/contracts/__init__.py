"""The doors: what a transport, adapter, fusion policy, compressor, bench peer, kernel set or store must be."""

from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.communicators import Communicators
from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.fusion import FusionPolicy, Ready
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.store import Store
from ddlcore.contracts.transport import DONE, Capabilities, Context, Memory, Plan, Prepared, Transport, Work

__all__ = [
    "API_VERSION",
    "DONE",
    "Adapter",
    "BenchPeer",
    "Capabilities",
    "Communicators",
    "Compressor",
    "Context",
    "FusionPolicy",
    "Kernels",
    "Memory",
    "Plan",
    "Prepared",
    "Ready",
    "Store",
    "Transport",
    "Work",
]

API_VERSION = (1, 0)  # a plugin built for another major version is refused
