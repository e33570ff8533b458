"""Builds the network of a test cluster: bridges on a switch, a veth pair to each host, rate limits."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence

from tools.test_cluster.possible import in_sbin

__all__ = ["Network", "address"]

SWITCH = "switch"
# Deep enough for one socket's window, so that tbf sets the rate and not a loss; large segments must fit its bucket.
_QUEUE_S = 0.02
_LEAST_BURST = 128 * 1024  # bytes


def address(number: int, family: int, network: int = 0) -> str:
    """Return the address of host ``number`` (from 1) on a network."""
    return f"10.77.{network}.{number}" if family == 4 else f"fd77:0:0:{network + 1:x}::{number:x}"


class Network:
    """The cables of a test cluster.

    ``pids``: the processes that hold the namespaces; ``root``: the words before every command.
    """

    def __init__(self, root: Sequence[str], pids: dict[str, int], networks: int) -> None:
        self._root = root
        self._pids = pids
        self._networks = networks

    def connect(self, names: Sequence[str], families: Sequence[int]) -> None:
        """Make a bridge for each network on the switch, and a cable from it to each host."""
        at_switch = ["link set lo up"]
        for network in range(self._networks):
            bridge = f"bridge{network}"
            at_switch += [f"link add {bridge} type bridge stp_state 0 mcast_snooping 0", f"link set {bridge} up"]
            for name in names:
                port = f"{name}.{network}"
                at_switch += [
                    f"link add {port} type veth peer name eth{network} netns {self._pids[name]}",
                    f"link set {port} master {bridge}",
                    f"link set {port} up",
                ]
        self._batch(SWITCH, "ip", at_switch)
        for i, name in enumerate(names):
            at_host = []
            for network in range(self._networks):
                for family in families:
                    rest = f"/24 dev eth{network}" if family == 4 else f"/64 dev eth{network} nodad"
                    at_host.append(f"address add {address(i + 1, family, network)}{rest}")
                at_host.append(f"link set eth{network} up")
            self._batch(name, "ip", at_host)

    def link(self, name: str, up: bool, network: int) -> None:
        """Connect one cable to the switch, or disconnect it."""
        self._batch(SWITCH, "ip", [f"link set {name}.{network} {'up' if up else 'down'}"])

    def limit(self, name: str, mbit: float | None, network: int) -> None:
        """Limit what a host sends, and what the switch sends to it."""
        discipline = "noqueue"
        if mbit is not None:
            bytes_s = mbit * 1e6 / 8
            burst = max(_LEAST_BURST, math.ceil(bytes_s / 1000))
            limit = burst + max(_LEAST_BURST, math.ceil(bytes_s * _QUEUE_S))
            discipline = f"tbf rate {mbit * 1e6:.0f}bit burst {burst} limit {limit}"
        self._batch(name, "tc", [f"qdisc replace dev eth{network} root {discipline}"])
        self._batch(SWITCH, "tc", [f"qdisc replace dev {name}.{network} root {discipline}"])

    def mute(self, name: str, muted: bool, network: int) -> None:
        """Drop what a host sends, and nothing else; or stop to do so, and remove its limit."""
        discipline = "pfifo limit 0" if muted else "noqueue"
        self._batch(name, "tc", [f"qdisc replace dev eth{network} root {discipline}"])

    def _batch(self, where: str, tool: str, lines: Sequence[str]) -> None:
        entering = [in_sbin("nsenter") or "nsenter", f"--net=/proc/{self._pids[where]}/ns/net"]
        command = [*self._root, *entering, in_sbin(tool) or tool, "-batch", "-"]
        told = "".join(f"{line}\n" for line in lines)
        done = subprocess.run(command, input=told, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{tool} on {where}: {done.stderr.strip()}; it was told:\n{told}")
