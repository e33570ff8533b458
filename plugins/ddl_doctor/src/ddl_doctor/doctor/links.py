"""Judge the measured latency and bandwidth between all ranks, and the clocks of the hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddlcore.contracts.check import Finding, Matrix
from ddlcore.text.numbers import duration

SLOW_GBITS = 10.0
MOST_RANKS = 16  # at most so many ranks are measured by default: 120 pairs, one after the other
CLOCK_S = 0.1  # with a larger difference, logs and file times of several hosts show a wrong order


@dataclass(frozen=True)
class Pair:
    """The measured latency and bandwidth from rank ``a`` to rank ``b`` over one transport."""

    a: int
    b: int
    latency_us: float | None = None
    gbytes_per_s: float | None = None  # 10⁹ bytes per second


@dataclass(frozen=True)
class Clock:
    """The difference between a rank's clock and the clock of the first rank, and the uncertainty of the difference.

    The difference is positive if the rank's clock is ahead.
    """

    rank: int
    offset_s: float
    error_s: float  # half of the fastest round trip


@dataclass
class MeasuredLinks:
    """All measurements between the ranks."""

    ranks: tuple[int, ...]  # the ranks that took part
    pairs: dict[str, list[Pair]] = field(default_factory=dict)  # by transport; both directions
    clocks: list[Clock] = field(default_factory=list)
    errors: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # by transport: the two ranks, and the error
    repeated: dict[str, list[Pair]] = field(default_factory=dict)  # by transport: first results of links measured again


def chosen_ranks(hosts: Sequence[int], most: int = MOST_RANKS) -> tuple[int, ...]:
    """Choose the ranks whose links are measured, and return them in ascending order.

    At most ``most`` ranks are chosen, but at least two. ``hosts`` holds the host index of each rank. The first rank of
    each host is chosen, then the second rank of each host, and so on.
    """
    turns: list[tuple[int, int, int]] = []  # position among the ranks of its host, host, rank
    for rank, host in enumerate(hosts):
        turns.append((hosts[:rank].count(host), host, rank))
    return tuple(sorted(rank for _, _, rank in sorted(turns)[: max(2, most)]))


def matrices(links: MeasuredLinks, host_of: Mapping[int, str] | None = None) -> Iterable[Matrix]:
    """Return two matrices for each transport: the latencies in µs, and the bandwidths in 10⁹ bytes per second.

    ``host_of`` holds the name of the host of each rank. If ``host_of`` is None, the matrices contain no host names.
    """
    places = {rank: place for place, rank in enumerate(links.ranks)}
    names = tuple(str(rank) for rank in links.ranks)
    hosts = tuple(host_of[rank] for rank in links.ranks) if host_of is not None else ()
    for transport, pairs in links.pairs.items():
        latency: list[list[float | None]] = [[None] * len(places) for _ in places]
        rates: list[list[float | None]] = [[None] * len(places) for _ in places]
        for pair in pairs:
            latency[places[pair.a]][places[pair.b]] = pair.latency_us
            rates[places[pair.a]][places[pair.b]] = pair.gbytes_per_s
        yield Matrix(f"{transport}: latency between ranks", "us", names, tuple(map(tuple, latency)), hosts)
        yield Matrix(f"{transport}: bandwidth between ranks", "GB/s", names, tuple(map(tuple, rates)), hosts)


def step_cost_s(model_bytes: float, hosts: int, gbytes_per_s: float) -> float:
    """Return the least time in seconds in which the gradients of one step cross the slowest link between hosts.

    ``model_bytes`` is the size of the gradients, and ``gbytes_per_s`` is the bandwidth of the slowest link in 10⁹ bytes
    per second. With n hosts, a ring sends 2 (n - 1) / n times ``model_bytes`` over every link. No algorithm sends less
    (Patarasuk and Yuan, 2009).
    """
    return 2 * (hosts - 1) / hosts * model_bytes / (gbytes_per_s * 1e9)


def judge_links(
    links: MeasuredLinks, host_of: Mapping[int, str], model_mb: float, cards: Mapping[str, str] | None = None
) -> Iterable[Finding]:
    """Return the findings about links: one if a link between hosts is slow, and one for each transport that failed.

    A link between two hosts is slow if its fastest transport has less than 10 Gbit/s. The finding names the slowest
    pair of hosts. ``host_of`` holds the name of the host of each rank, and ``model_mb`` is the size of the gradients of
    one step in 10⁶ bytes. ``cards`` holds a description of the network cards of each host.
    """
    best: dict[tuple[str, str], tuple[float, str]] = {}  # by pair of hosts: the rate and name of the best transport
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
            f"{gbits(rate)} between {a} and {b} by {transport}, below {SLOW_GBITS:g} Gbit/s{others}",
            f"a step of a model with {model_mb:g} MB of gradients spends {duration(cost_s)} on that link, "
            f"{duration(wanted_s)} at {SLOW_GBITS:g} Gbit/s, as far as it is not hidden behind computation",
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
    """Return, for each pair of hosts, the bandwidth of the slower direction, in 10⁹ bytes per second.

    The bandwidth of a direction is the bandwidth of the fastest pair of ranks in this direction.
    """
    ways: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for pair in pairs:
        way = (host_of[pair.a], host_of[pair.b])
        if way[0] != way[1] and pair.gbytes_per_s is not None:
            both = ways.setdefault((min(way), max(way)), {})
            both[way] = max(both.get(way, 0.0), pair.gbytes_per_s)
    return {hosts: min(both.values()) for hosts, both in ways.items()}


def judge_clocks(clocks: Sequence[Clock], host_of: Mapping[int, str], first: str) -> Iterable[Finding]:
    """Return a finding for each clock that differs from the clock of the host ``first`` by more than 0.1 s.

    The uncertainty of the measurement is subtracted from the difference before the comparison. ``host_of`` holds the
    name of the host of each rank.
    """
    for one in clocks:
        if abs(one.offset_s) - one.error_s > CLOCK_S:
            ahead = "ahead of" if one.offset_s > 0 else "behind"
            yield Finding(
                "clocks",
                f"the clock of {host_of[one.rank]} is {duration(abs(one.offset_s))} {ahead} that of {first} "
                f"(± {duration(one.error_s)})",
                "lines of logs and times of files and checkpoints show a wrong order; "
                "certificates and tickets may be refused",
                f"on {host_of[one.rank]}: sudo timedatectl set-ntp true, or chronyc makestep; "
                "chronyc tracking shows what it follows",
                host_of[one.rank],
            )


def gbits(gbytes_per_s: float) -> str:
    """Return a bandwidth as text in bits per second, such as "9.4 Gbit/s"."""
    return f"{gbytes_per_s * 8:.2g} Gbit/s"
