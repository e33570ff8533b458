"""Find the links that are much slower than the other links of their kind, and say what to do. Measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddlcore.commands.doctor.links import Links, Pair, gbits
from ddlcore.contracts.check import Finding
from ddlcore.text.numbers import duration

# Links of one kind differ for good reasons: two sockets of a host, or another switch on the way, make a link two or
# three times slower. Five times is more than that.
FACTOR = 5.0
# If a rank waits long enough to fall asleep, waking it takes 5 to 20 µs. A difference of that size says nothing about
# the link, even if it is many times the latency of shared memory.
LEAST_US = 20.0


@dataclass(frozen=True)
class Outlier:
    """A link that is much slower than usual for its transport and its kind (within a host, or between hosts)."""

    transport: str
    pair: Pair
    within_host: bool
    is_latency: bool  # its latency is too large; otherwise its bandwidth is too small
    usual: float  # the same quantity of good links of this kind: µs, or 10⁹ bytes per second
    peers: int  # number of the other links of this kind

    @property
    def factor(self) -> float:
        """How many times worse than usual the link is."""
        value = _value(self.pair, self.is_latency) or 0.0
        return value / self.usual if self.is_latency else self.usual / value if value else float("inf")


def outliers(transport: str, pairs: Sequence[Pair], host_of: Mapping[int, Hashable]) -> list[Outlier]:
    """Return the outliers among the links ``pairs`` of one transport, the worst first.

    A link is compared with the other links of its kind: both ranks on one host, or on two. What is usual is the
    quartile of these on the good side, not their median: a single bad host of three slows down four of six links. The
    only other link of two ranks is the opposite direction of the same link.
    """
    found = []
    for within_host in (True, False):
        kind = [pair for pair in pairs if (host_of[pair.a] == host_of[pair.b]) == within_host]
        for is_latency in (True, False):
            for i, pair in enumerate(kind):
                others = [_value(one, is_latency) for one in (*kind[:i], *kind[i + 1 :])]
                usual = _good_quartile([one for one in others if one is not None], is_latency)
                if usual is not None and _is_far(_value(pair, is_latency), usual, is_latency):
                    found.append(Outlier(transport, pair, within_host, is_latency, usual, len(others)))
    return sorted(found, key=lambda one: -one.factor)


def judge_outliers(links: Links, host_of: Mapping[int, str]) -> Iterable[Finding]:
    """Return findings about links that are much slower than the others of their kind.

    There is one for each transport, kind of link and quantity. It names the worst link, and the host or rank that all
    of these links have in common, if there is one.
    """
    for transport, pairs in links.pairs.items():
        slow = outliers(transport, pairs, host_of)
        for within_host in (True, False):
            for is_latency in (True, False):
                alike = [one for one in slow if one.within_host == within_host and one.is_latency == is_latency]
                if alike:
                    yield _finding(alike, host_of)


def repeated_lines(links: Links) -> list[str]:
    """Return a line for each link that was measured again, with its first latency and bandwidth and those that count."""
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


def _finding(alike: Sequence[Outlier], host_of: Mapping[int, str]) -> Finding:
    worst, a, b = alike[0], alike[0].pair.a, alike[0].pair.b
    kind = "within a host" if worst.within_host else "between hosts"
    way = f"from rank {a} ({host_of[a]}) to rank {b} ({host_of[b]}) by {worst.transport}"
    if worst.is_latency:
        latency = duration((worst.pair.latency_us or 0.0) / 1e6)
        what = f"a message of 8 bytes {way} takes {latency}, {worst.factor:.0f} times as long as usual {kind}"
        what += f" ({duration(worst.usual / 1e6)})"
        means = "every bucket waits for the slowest link, so each of them takes at least that much longer"
    else:
        what = f"{gbits(worst.pair.gbytes_per_s or 0.0)} {way}, {worst.factor:.0f} times less than usual {kind}"
        what += f" ({gbits(worst.usual)})"
        means = "every bucket waits for the slowest link, so the other links are hardly ever used at their full speed"
    if len(alike) > 1:
        what += f", and {len(alike) - 1} more of {worst.peers + 1} links"
    where = _in_common(alike, host_of)
    if len(alike) > 1 and where:
        what += f", all of them from or to {where}"
    if worst.within_host:
        fix = (
            f"on {host_of[a]}: `top` (press 1) shows whether other programs use the cores of these ranks, and "
            "`taskset -cp PID` whether both ranks are bound to one core; then run `ddl doctor` again"
        )
    else:
        fix = (
            f"compare `ping -c 20`, `ethtool DEVICE` and `ip -s link` on {host_of[a]} and {host_of[b]} with two hosts "
            "whose link is good: a cable, a switch port or power saving of the card may be the cause, or traffic that "
            "takes another network (--network-interface); then run `ddl doctor` again"
        )
    return Finding("links", what, means, fix, where or ", ".join(dict.fromkeys((host_of[a], host_of[b]))))


def _in_common(alike: Sequence[Outlier], host_of: Mapping[int, str]) -> str:
    """Return the one host, or the one rank if all are on one host, that takes part in all of these links; "" if none."""

    def ends(one: Outlier) -> set[str]:
        ranks = (one.pair.a, one.pair.b)
        return {f"rank {rank}" if one.within_host else host_of[rank] for rank in ranks}

    shared = set.intersection(*map(ends, alike))
    return shared.pop() if len(shared) == 1 else ""


def _value(pair: Pair, is_latency: bool) -> float | None:
    return pair.latency_us if is_latency else pair.gbytes_per_s


def _good_quartile(values: Sequence[float], is_latency: bool) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low if is_latency else high


def _is_far(value: float | None, usual: float, is_latency: bool) -> bool:
    if value is None:
        return False
    return value > usual * FACTOR and value - usual > LEAST_US if is_latency else value * FACTOR < usual


def _both(pair: Pair) -> str:
    return f"{duration((pair.latency_us or 0.0) / 1e6)} and {gbits(pair.gbytes_per_s or 0.0)}"
