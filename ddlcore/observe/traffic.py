"""Read how many bytes have gone over the network interfaces that a job uses, as the kernel of this host counts them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ddlcore.contracts.interfaces import interface_addresses
from ddlcore.messages import Traffic

_WORD = 4  # InfiniBand's counters count words of so many bytes
_INFINIBAND = Path("/sys/class/infiniband")


class TrafficMeter:
    """The counters of the interface that has ``address``, and of all InfiniBand ports of this host.

    Transports that use RDMA pass by the counters of network interfaces. If no interface has ``address``, there are only
    the ports.
    """

    def __init__(self, address: str, infiniband: Path = _INFINIBAND) -> None:
        """Find the interface and the ports. ``infiniband`` is the directory in which the kernel shows the ports."""
        found: list[str] = []
        with contextlib.suppress(OSError):
            found = [name for name, known in interface_addresses().items() if address in known]
        self._name = found[0] if found else ""
        self._ports = sorted(infiniband.glob("*/ports/*")) if infiniband.is_dir() else []

    def read(self) -> tuple[Traffic, ...]:
        """Return the present counters. What the system does not tell is left out."""
        return (*self._interface(), *(one for port in self._ports for one in _port(port)))

    def _interface(self) -> tuple[Traffic, ...]:
        if not self._name:
            return ()
        import psutil  # here, because few ranks need it

        counted = psutil.net_io_counters(pernic=True).get(self._name)
        if counted is None:
            return ()
        stats = psutil.net_if_stats().get(self._name)
        bits_per_s = max(stats.speed, 0) * 1e6 if stats is not None else 0.0
        return (Traffic(self._name, counted.bytes_recv, counted.bytes_sent, bits_per_s),)


def _port(port: Path) -> tuple[Traffic, ...]:
    try:
        received, sent = (int((port / "counters" / f"port_{way}_data").read_text()) * _WORD for way in ("rcv", "xmit"))
        gigabits = float((port / "rate").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return ()
    return (Traffic(f"{port.parent.parent.name}:{port.name}", received, sent, gigabits * 1e9),)
