"""What follows from latency and bandwidth between all ranks, and from the clocks of hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddlcore.contracts.check import Finding, Matrix

__all__ = [
    "SLOW_GBITS",
    "Clock",
    "Links",
    "Pair",
    "chosen_ranks",
    "judge_clocks",
    "judge_links",
    "matrices",
    "step_cost_s",
]

SLOW_GBITS = 10.0
MOST_RANKS = 16  # are measured by default: 120 pairs, one after the other
CLOCK_S = 0.1  # beyond it lines of logs and times of files tell a wrong order


@dataclass(frozen=True)
class Pair:
    """From one rank to another, by one transport."""

    a: int
    b: int
    latency_us: float | None = None
    gbytes_per_s: float | None = None  # 10⁹ bytes a second


@dataclass(frozen=True)
class Clock:
    """How much a rank's clock is ahead of the first one's, as far as it can be told."""

    rank: int
    offset_s: float
    error_s: float  # half of the quickest round trip


@dataclass
class Links:
    """All that was measured between the ranks."""

    ranks: tuple[int, ...]  # that took part
    pairs: dict[str, list[Pair]] = field(default_factory=dict)  # by transport; both ways
    clocks: list[Clock] = field(default_factory=list)
    errors: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # by transport: between whom, and why


def chosen_ranks(hosts: Sequence[int], most: int = MOST_RANKS) -> tuple[int, ...]:
    """At most so many of the ranks, whose hosts' indexes ``hosts`` gives: the first of each host, then the second, …"""
    turns: list[tuple[int, int, int]] = []  # how-manieth of its host, host, rank
    for rank, host in enumerate(hosts):
        turns.append((hosts[:rank].count(host), host, rank))
    return tuple(sorted(rank for _, _, rank in sorted(turns)[: max(2, most)]))


def matrices(links: Links) -> Iterable[Matrix]:
    """Latency and bandwidth of each transport."""
    places = {rank: place for place, rank in enumerate(links.ranks)}
    names = tuple(str(rank) for rank in links.ranks)
    for transport, pairs in links.pairs.items():
        latency: list[list[float | None]] = [[None] * len(places) for _ in places]
        rates: list[list[float | None]] = [[None] * len(places) for _ in places]
        for pair in pairs:
            latency[places[pair.a]][places[pair.b]] = pair.latency_us
            rates[places[pair.a]][places[pair.b]] = pair.gbytes_per_s
        yield Matrix(f"{transport}: latency between ranks", "us", names, tuple(map(tuple, latency)))
        yield Matrix(f"{transport}: bandwidth between ranks", "GB/s", names, tuple(map(tuple, rates)))


def step_cost_s(model_bytes: float, hosts: int, gbytes_per_s: float) -> float:
    """Seconds that gradients of so many bytes take at least across the slowest link between hosts.

    A ring sends 2 (n - 1) / n of them over every link, and nothing sends less (Patarasuk and Yuan, 2009).
    """
    return 2 * (hosts - 1) / hosts * model_bytes / (gbytes_per_s * 1e9)


def judge_links(
    links: Links, host_of: Mapping[int, str], model_mb: float, cards: Mapping[str, str] | None = None
) -> Iterable[Finding]:
    """Pairs of hosts that no transport drives at 10 Gbit/s, and transports that could not be opened.

    ``host_of``: by rank; ``cards``: by host its network cards, in words.
    """
    best: dict[tuple[str, str], tuple[float, str]] = {}  # by hosts: the rate of the best transport
    for transport, pairs in links.pairs.items():
        for hosts, rate in _worse_way(pairs, host_of).items():
            best[hosts] = max(best.get(hosts, (0.0, "")), (rate, transport))
    slow = {hosts: found for hosts, found in best.items() if found[0] * 8 < SLOW_GBITS}
    if slow:
        (a, b), (rate, transport) = min(slow.items(), key=lambda item: item[1])
        count = len({host_of[rank] for rank in links.ranks})
        cost_s, wanted_s = (step_cost_s(model_mb * 1e6, count, one) for one in (rate, SLOW_GBITS / 8))
        known = "; ".join(f"{host} has {cards[host]}" for host in (a, b) if cards and cards.get(host))
        others = f", and {len(slow) - 1} more of {len(best)} pairs of hosts" if len(slow) > 1 else ""
        yield Finding(
            "links",
            f"{_gbits(rate)} between {a} and {b} by {transport}, below {SLOW_GBITS:g} Gbit/s{others}",
            f"a step of a model with {model_mb:g} MB of gradients spends {_seconds(cost_s)} on that link, "
            f"{_seconds(wanted_s)} at {SLOW_GBITS:g} Gbit/s, as far as it is not hidden behind computation",
            "join the hosts by a faster network and name it by --network-interface"
            + (f" ({known})" if known else "")
            + "; until then send less: compression (fp16 halves it), backward_passes_per_step, larger batches a rank",
            f"{a}, {b}",
        )
    for transport, (first, second, why) in links.errors.items():
        between = " and ".join(f"rank {rank} ({host_of[rank]})" for rank in (first, second))
        yield Finding(
            "links",
            f"{transport} does not work between {between}: {why}",
            f"a job with --backend {transport} would fail there, or `auto` would take another transport",
            "see that no firewall stands between them and that both use the same network (--network-interface); "
            "else leave it out: --backend, or DDL_PLUGINS_OFF",
            host_of[first],
        )


def _worse_way(pairs: Iterable[Pair], host_of: Mapping[int, str]) -> dict[tuple[str, str], float]:
    """By pair of hosts: what the best pair of ranks reaches, in the slower direction."""
    ways: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for pair in pairs:
        way = (host_of[pair.a], host_of[pair.b])
        if way[0] != way[1] and pair.gbytes_per_s is not None:
            both = ways.setdefault((min(way), max(way)), {})
            both[way] = max(both.get(way, 0.0), pair.gbytes_per_s)
    return {hosts: min(both.values()) for hosts, both in ways.items()}


def judge_clocks(clocks: Sequence[Clock], host_of: Mapping[int, str], first: str) -> Iterable[Finding]:
    """Hosts whose clocks differ from that of host ``first`` by more than a tenth of a second, beyond doubt."""
    for one in clocks:
        if abs(one.offset_s) - one.error_s > CLOCK_S:
            ahead = "ahead of" if one.offset_s > 0 else "behind"
            yield Finding(
                "clocks",
                f"the clock of {host_of[one.rank]} is {_seconds(abs(one.offset_s))} {ahead} that of {first} "
                f"(± {_seconds(one.error_s)})",
                "lines of logs and times of files and checkpoints tell a wrong order; certificates and tickets may be refused",
                f"on {host_of[one.rank]}: sudo timedatectl set-ntp true, or chronyc makestep; chronyc tracking shows what it follows",
                host_of[one.rank],
            )


def _gbits(gbytes_per_s: float) -> str:
    return f"{gbytes_per_s * 8:.2g} Gbit/s"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"
