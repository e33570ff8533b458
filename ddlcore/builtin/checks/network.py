"""Tells the network cards of a host and how fast each says that it is; what a slow one costs is judged elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ddlcore.contracts.check import Check, Finding, HostView, Seen

__all__ = ["NetworkCardsCheck"]

_ETHERNET, _INFINIBAND = "1", "32"  # as the kernel numbers types of links


class NetworkCardsCheck(Check):
    """Cards that are up, with their speed where the driver knows one."""

    name = "network-cards"

    def look(self, host: HostView) -> Any:
        """In words: ["eth0 10000 Mbit/s", …]."""
        found = []
        for name in host.names("/sys/class/net"):
            card = f"/sys/class/net/{name}"
            if host.read(f"{card}/type").strip() not in (_ETHERNET, _INFINIBAND):
                continue
            if host.read(f"{card}/operstate").strip() == "down":
                continue
            speed = host.read(f"{card}/speed").strip()
            found.append(f"{name} {speed} Mbit/s" if speed.isdecimal() else name)
        return found

    def judge(self, seen: Sequence[Seen]) -> Iterable[Finding]:
        """None: speeds on paper prove nothing; the links are measured."""
        return ()

    def line(self, seen: Sequence[Seen]) -> str:
        return "; ".join(f"{one.host}: {', '.join(one.facts)}" for one in seen if one.facts)
