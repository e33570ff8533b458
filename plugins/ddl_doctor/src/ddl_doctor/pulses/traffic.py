"""Read the operating system's counters of the bytes that were sent and received by a job's network interfaces."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ddl_doctor.reports import Traffic
from ddlcore.contracts.interfaces import interface_addresses

_WORD = 4  # InfiniBand's counters count words of 4 bytes
_INFINIBAND = Path("/sys/class/infiniband")


class TrafficMeter:
    """Reads the counters of the network interface with the address ``address``, and of all InfiniBand ports.

    The ports are read, too, because RDMA traffic is not counted by the network interfaces. If no interface has
    ``address``, only the ports are read.
    """

    def __init__(self, address: str, infiniband: Path = _INFINIBAND) -> None:
        """Find the interface and the ports. ``infiniband`` is the directory of the kernel's files about the ports."""
        found: list[str] = []
        with contextlib.suppress(OSError):
            found = [name for name, known in interface_addresses().items() if address in known]
        self._name = found[0] if found else ""
        self._ports = sorted(infiniband.glob("*/ports/*")) if infiniband.is_dir() else []

    def read(self) -> tuple[Traffic, ...]:
        """Return the present counters. An interface or port whose counters cannot be read is left out."""
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
