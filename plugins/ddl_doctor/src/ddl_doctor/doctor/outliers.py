"""Find the links that are much slower than other links of the same kind, and say what to do. Measures nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddl_doctor.doctor.links import MeasuredLinks, Pair, gbits
from ddlcore.contracts.check import Finding
from ddlcore.text.numbers import duration

# Links of one kind differ for good reasons: two sockets of a host, or another switch on the way, make a link two or
# three times slower. Five times is more than that.
FACTOR = 5.0
# If a rank waits so long that it sleeps, the system needs 5 to 20 µs to wake it. A difference of that size says nothing
# about the link, even if the difference is many times the latency of shared memory.
LEAST_US = 20.0


@dataclass(frozen=True)
class Outlier:
    """A link whose latency or bandwidth is much worse than usual for its transport and kind.

    There are two kinds: links within a host, and links between hosts.
    """

    transport: str
    pair: Pair
    within_host: bool
    is_latency: bool  # true: the link's latency is too large; false: its bandwidth is too small
    usual: float  # the value with which the link is compared, in µs or 10⁹ bytes per second
    is_twin: bool  # true: ``usual`` is the value of the opposite direction; false: of good links of this kind
    peers: int  # number of the other links of this kind

    @property
    def factor(self) -> float:
        """The factor by which the value of this link is worse than the usual value."""
        value = _value(self.pair, self.is_latency) or 0.0
        return value / self.usual if self.is_latency else self.usual / value if value else float("inf")


def outliers(transport: str, pairs: Sequence[Pair], host_of: Mapping[int, Hashable]) -> list[Outlier]:
    """Return the outliers among the links ``pairs`` of one transport, the worst first.

    ``host_of`` holds the host of each rank. A link is compared with two values; the better of them counts. The first
    value is a quartile of the other links of the same kind (both ranks on one host, or on two hosts): the quartile on
    the good side. The median would not do, because one bad host of three hosts slows down four of six links. The second
    value is the value of the opposite direction of the same link. For latencies the two directions should be equal,
    because each latency is half of a round trip between the same two ranks.
    """
    found = []
    for within_host in (True, False):
        kind = [pair for pair in pairs if (host_of[pair.a] == host_of[pair.b]) == within_host]
        for is_latency in (True, False):
            values = {(pair.a, pair.b): _value(pair, is_latency) for pair in kind}
            for pair in kind:
                value, twin = values[pair.a, pair.b], values.get((pair.b, pair.a))
                others = [one for way, one in values.items() if way != (pair.a, pair.b) and one is not None]
                if value is None or not others:
                    continue
                quartile = _good_quartile(others, is_latency)
                usual, is_twin = quartile, False
                if twin is not None and (len(others) == 1 or (twin < quartile if is_latency else twin > quartile)):
                    usual, is_twin = twin, True
                if _is_far(value, usual, is_latency):
                    found.append(Outlier(transport, pair, within_host, is_latency, usual, is_twin, len(others)))
    return sorted(found, key=lambda one: -one.factor)


def judge_outliers(links: MeasuredLinks, host_of: Mapping[int, str], cores: Mapping[str, int]) -> Iterable[Finding]:
    """Return the findings about links that are much slower than the other links of the same kind.

    There is at most one finding for each transport, kind of link (within a host, between hosts) and quantity (latency,
    bandwidth). A finding names the worst link. It also names the host or rank that all slow links have in common, if
    there is one. ``host_of`` holds the host of each rank. ``cores`` holds, for each host where it is known, the number
    of cores that the ranks of the host may use.
    """
    crowded = {
        host: f"{host} has {cores[host]} core{'s' * (cores[host] != 1)} for {count} ranks"
        for host, count in Counter(host_of.values()).items()
        if count > cores.get(host, count)
    }
    for transport, pairs in links.pairs.items():
        slow = outliers(transport, pairs, host_of)
        for within_host in (True, False):
            for is_latency in (True, False):
                alike = [one for one in slow if one.within_host == within_host and one.is_latency == is_latency]
                if alike:
                    yield _finding(alike, host_of, crowded)


def repeated_lines(links: MeasuredLinks) -> list[str]:
    """Return one line of text for each link that was measured again.

    The line contains the latency and bandwidth of the first measurement, and the best values of all measurements.
    """
    lines = []
    for transport, firsts in links.repeated.items():
        last = {(pair.a, pair.b): pair for pair in links.pairs.get(transport, ())}
        for first in firsts:
            final = last[first.a, first.b]
            lines.append(
                f"{transport}, rank {first.a} to rank {first.b}: {_both(first)} at first; "
                f"the best of several measurements counts, {_both(final)}"
            )
    return lines


def _finding(alike: Sequence[Outlier], host_of: Mapping[int, str], crowded: Mapping[str, str]) -> Finding:
    worst, a, b = alike[0], alike[0].pair.a, alike[0].pair.b
    kind = "within a host" if worst.within_host else "between hosts"
    usual = "in the other direction" if worst.is_twin else f"is usual {kind}"
    way = f"from rank {a} ({host_of[a]}) to rank {b} ({host_of[b]}) by {worst.transport}"
    if worst.is_latency:
        latency = duration((worst.pair.latency_us or 0.0) / 1e6)
        what = f"a message of 8 bytes {way} takes {latency}, {worst.factor:.0f} times as long as {usual}"
        what += f" ({duration(worst.usual / 1e6)})"
        means = "every bucket waits for the slowest link, so each of them takes at least that much longer"
    else:
        what = f"{gbits(worst.pair.gbytes_per_s or 0.0)} {way}, {worst.factor:.0f} times less than {usual}"
        what += f" ({gbits(worst.usual)})"
        means = "every bucket waits for the slowest link, so the other links are hardly ever used at their full speed"
    if len(alike) > 1:
        what += f", and {len(alike) - 1} more of {worst.peers + 1} links"
    where = _in_common(alike, host_of)
    if len(alike) > 1 and where:
        what += f", all of them from or to {where}"
    few_cores = [crowded[host] for host in dict.fromkeys((host_of[a], host_of[b])) if host in crowded]
    if few_cores:
        means += f"; {' and '.join(few_cores)}, so ranks wait for each other's turn on a core"
    return Finding(
        "links",
        what,
        means,
        _fix(worst, host_of, bool(few_cores)),
        where or ", ".join(sorted({host_of[a], host_of[b]})),
    )


def _fix(worst: Outlier, host_of: Mapping[int, str], few_cores: bool) -> str:
    hosts = sorted({host_of[worst.pair.a], host_of[worst.pair.b]})
    if few_cores:
        return f"start as many ranks on {' and '.join(hosts)} as there are cores, or fewer: -np, or -H HOST:SLOTS"
    if worst.within_host:
        return (
            f"on {hosts[0]}: `top` (press 1) shows whether other programs use the cores of these ranks, and "
            "`taskset -cp PID` whether both ranks are bound to one core; then run `ddl doctor` again"
        )
    return (
        f"compare `ping -c 20`, `ethtool DEVICE` and `ip -s link` on {' and '.join(hosts)} with two hosts whose link is "
        "good: a cable, a switch port or power saving of the card may be the cause, or traffic that takes another "
        "network (--network-interface); then run `ddl doctor` again"
    )


def _in_common(alike: Sequence[Outlier], host_of: Mapping[int, str]) -> str:
    """Return the host that all links in ``alike`` have in common, or the rank if the links are within a host.

    Return an empty string if there is no common host or rank, or more than one.
    """

    def ends(one: Outlier) -> set[str]:
        ranks = (one.pair.a, one.pair.b)
        return {f"rank {rank}" if one.within_host else host_of[rank] for rank in ranks}

    shared = set.intersection(*map(ends, alike))
    return shared.pop() if len(shared) == 1 else ""


def _value(pair: Pair, is_latency: bool) -> float | None:
    return pair.latency_us if is_latency else pair.gbytes_per_s


def _good_quartile(values: Sequence[float], is_latency: bool) -> float:
    if len(values) < 2:
        return values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low if is_latency else high


def _is_far(value: float, usual: float, is_latency: bool) -> bool:
    return value > usual * FACTOR and value - usual > LEAST_US if is_latency else value * FACTOR < usual


def _both(pair: Pair) -> str:
    return f"{duration((pair.latency_us or 0.0) / 1e6)} and {gbits(pair.gbytes_per_s or 0.0)}"
