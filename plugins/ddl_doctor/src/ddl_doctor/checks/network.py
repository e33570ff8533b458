"""Reports the network cards of a host, and the speed that the driver of each card states.

This module measures nothing. Another check measures the links between hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ddlcore.contracts.check import Check, Finding, HostView, Seen

_ETHERNET, _INFINIBAND = "1", "32"  # the kernel's numbers for types of links


class NetworkCardsCheck(Check):
    """A check that lists the network cards that are up, with the speed of each card if its driver states the speed."""

    name = "network-cards"

    def look(self, host: HostView) -> Any:
        """Return the cards as a list of texts such as "eth0 10000 Mbit/s". A card without a known speed is "eth0"."""
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
        """Return no findings, because the stated speed of a card does not show how fast its links really are.

        Another check measures the links.
        """
        return ()

    def line(self, seen: Sequence[Seen]) -> str:
        return "; ".join(f"{one.host}: {', '.join(one.facts)}" for one in seen if one.facts)
