"""Time every pair of ranks over each transport, one pair at a time. Judges nothing."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import ddlcore.api as ddl
from ddl_doctor.bench.contenders import finish
from ddl_doctor.doctor.links import Clock, MeasuredLinks, Pair
from ddl_doctor.doctor.outliers import outliers
from ddlcore.contracts.store import PrefixStore
from ddlcore.contracts.transport import Transport
from ddlcore.errors import DdlInternalError
from ddlcore.hooks import TransportProvider
from ddlcore.plug.registry import Registry
from ddlcore.process.build import build_transport
from ddlcore.process.job import Job
from ddlcore.runtime.routes import Route
from ddlcore.types import Buffer, DType

OPEN_S = 15.0
PAIR_S = 60.0
_WARM = 3
_PINGS = 100  # at most so many round trips in one measurement
_PINGS_S = 0.05  # at most so many seconds in one measurement
_FIRST_BYTES = 1 << 18
_MOST_BYTES = 1 << 24
_COPY_S = 0.1  # the size of a copy is increased until it takes about so long
_COPIES = 3
_AGAIN = 2  # a link is measured again so many times while it is much slower than the other links
_MOST_AGAIN = 8  # at most so many links are measured again; if more links are slow, the reason is not chance

Share = Callable[[object], list[Any]]  # gathers one object of each rank on all ranks


def pair_transports(registry: Registry, wanted: Sequence[str], launcher: str) -> list[TransportProvider]:
    """Return the transports that can be measured between pairs of processes and are usable on this host.

    If ``wanted`` is not empty, only the transports that it names are returned. If ``wanted`` is empty, the transports
    that need another launcher than ``launcher`` are left out. ``launcher`` is the launcher that has started the
    processes.
    """
    return [
        one
        for one in registry.transports.values()
        if (one.name in wanted if wanted else one.launcher in ("", launcher))
        and not (one.in_process or one.composes or one.sizes[1] == 1)
        and "cpu" in one.devices
        and not registry.missing(one)
    ]


def measure_links(
    job: Job, transports: Sequence[TransportProvider], ranks: Sequence[int], share: Share | None = None
) -> MeasuredLinks:
    """Measure the links between all pairs of ``ranks`` over each transport, and the clocks of their hosts.

    Every rank must call this function with the same arguments. All ranks get the same result. ``share`` gathers one
    object of each rank on all ranks; None means ``ddl.allgather_object``.
    """
    share = share or ddl.allgather_object
    hosts = job.placement.hosts
    links = MeasuredLinks(tuple(ranks))
    clocked: set[int] = {hosts[ranks[0]]}
    for provider in transports:
        found: list[Pair] = []
        for a, b in ((a, b) for i, a in enumerate(ranks) for b in ranks[i + 1 :]):
            if provider.one_host and hosts[a] != hosts[b]:
                continue
            mine = _measure(job, provider, a, b, with_clock=a == ranks[0] and hosts[b] not in clocked)
            everyone = [one for one in share(mine) if one is not None]
            errors = [text for _, _, text in everyone if text]
            if errors:
                links.errors[provider.name] = (a, b, errors[0])
                break
            found += [pair for pairs, _, _ in everyone for pair in pairs]
            clocks = [clock for _, clock, _ in everyone if clock is not None]
            links.clocks += clocks
            clocked |= {hosts[clock.rank] for clock in clocks}
        if found:
            links.pairs[provider.name] = found
            if provider.name not in links.errors:
                _measure_again(job, provider, links, share)
    return links


def _measure_again(job: Job, provider: TransportProvider, links: MeasuredLinks, share: Share) -> None:
    """Measure slow links again, and store the best result of each direction in ``links``.

    A link is slow if it is much slower than the other links. The link may have been slow only for a moment, because
    both ranks shared a core or the network was busy. A broken link stays slow. All ranks have the same results, so all
    ranks choose the same links.
    """
    hosts = dict(enumerate(job.placement.hosts))
    first = {(pair.a, pair.b): pair for pair in links.pairs[provider.name]}
    best = dict(first)
    repeated: list[tuple[int, int]] = []  # lower rank first
    for turn in range(1, _AGAIN + 1):
        slow = outliers(provider.name, list(best.values()), hosts)
        suspects = list(dict.fromkeys((min(one.pair.a, one.pair.b), max(one.pair.a, one.pair.b)) for one in slow))
        for a, b in suspects[:_MOST_AGAIN]:
            everyone = [one for one in share(_measure(job, provider, a, b, False, turn)) if one is not None]
            for pair in (pair for pairs, _, _ in everyone for pair in pairs):
                best[pair.a, pair.b] = _better(best[pair.a, pair.b], pair)
            if (a, b) not in repeated:
                repeated.append((a, b))
    if repeated:
        links.pairs[provider.name] = list(best.values())
        links.repeated[provider.name] = [first[way] for a, b in repeated for way in ((a, b), (b, a))]


def _better(one: Pair, other: Pair) -> Pair:
    """Combine two measurements of the same link: return the smaller latency and the larger bandwidth."""
    latencies = [pair.latency_us for pair in (one, other) if pair.latency_us is not None]
    rates = [pair.gbytes_per_s for pair in (one, other) if pair.gbytes_per_s is not None]
    return replace(one, latency_us=min(latencies, default=None), gbytes_per_s=max(rates, default=None))


_Measured = tuple[list[Pair], Clock | None, str]


def _measure(
    job: Job, provider: TransportProvider, a: int, b: int, with_clock: bool, turn: int = 0
) -> _Measured | None:
    """Measure the link between the ranks ``a`` and ``b``. Return None on all other ranks.

    ``turn`` is the number of earlier measurements of this link. The ranks ``a`` and ``b`` return three values:

    * The link from this rank to the other rank, as a list of one element. The list is empty if there is an error.
    * The difference of the two clocks, on rank ``a`` if ``with_clock`` is true. None in all other cases.
    * The error as one line of text. The text is empty if there is no error.
    """
    if job.rank not in (a, b):
        return None
    whole = job.context(f"doctor-{provider.name}-{a}-{b}-{turn}")
    context = replace(
        whole,
        rank=0 if job.rank == a else 1,
        members=(whole.members[a], whole.members[b]),
        store=PrefixStore("pair/", whole.store),
        timeout_s=min(whole.timeout_s, OPEN_S),
    )
    try:
        transport = build_transport(job.registry, Route(provider, "to be measured"))
        watch = threading.Timer(PAIR_S, transport.abort)  # abort makes a call that hangs raise an exception
        watch.daemon = True
        watch.start()
        try:
            transport.open(context)
            latency_s, rate = time_pair(transport, context.rank)
            pair = Pair(job.rank, b if job.rank == a else a, latency_s * 1e6, rate / 1e9)
            clock = _clock(transport, context.rank, b) if with_clock else None
            finish(transport.barrier())
        finally:
            watch.cancel()
            watch.join()
            transport.close()
    except (DdlInternalError, OSError, RuntimeError, ValueError) as error:
        return [], None, f"{type(error).__name__}: {error}".partition("\n")[0]
    return [pair], clock, ""


def time_pair(transport: Transport, rank: int) -> tuple[float, float]:
    """Return the latency in seconds and the bandwidth in bytes per second from ``rank`` to the other rank.

    ``transport`` is an open transport of two ranks, and ``rank`` is this process's rank in it. Both ranks must call
    this function.
    """
    timed = {root: (_latency_s(transport, root, rank), _rate(transport, root, rank)) for root in (0, 1)}
    return timed[rank]


def _latency_s(transport: Transport, root: int, rank: int) -> float:
    """Measure the latency. On rank ``root``, return half of the median time of a round trip of eight bytes, in seconds.

    On the other rank, return 0. Both ranks must call this function.
    """
    word = np.zeros(1, np.int64)
    there, back = _sender(transport, word, root), _sender(transport, word, 1 - root)
    for _ in range(_WARM):
        there(), back()
    begun_s = time.perf_counter()
    there(), back()
    once_s = time.perf_counter() - begun_s
    pings = _agreed(transport, int(max(3, min(_PINGS, _PINGS_S / max(once_s, 1e-9)))), root)
    trips = []
    for _ in range(pings):
        begun_s = time.perf_counter()
        there(), back()
        trips.append(time.perf_counter() - begun_s)
    return statistics.median(trips) / 2 if rank == root else 0.0


def _rate(transport: Transport, root: int, rank: int) -> float:
    """Measure the bandwidth. On rank ``root``, return the bytes per second that it sends; on the other rank, return 0.

    The result comes from the median time of several copies. The other rank answers each copy with one word, and the
    time of the copy ends when the word arrives. Both ranks must call this function.
    """
    nbytes = _FIRST_BYTES
    once_s = _copy_s(transport, nbytes, root)
    while nbytes < _MOST_BYTES and once_s * (nbytes * 2 / _FIRST_BYTES) < _COPY_S:
        nbytes *= 2
    nbytes = _agreed(transport, nbytes, root)
    times = [_copy_s(transport, nbytes, root) for _ in range(_COPIES)]
    return nbytes / statistics.median(times) if rank == root else 0.0


def _copy_s(transport: Transport, nbytes: int, root: int) -> float:
    there = _sender(
        transport, np.ones(nbytes // 8, np.int64), root
    )  # not zeros: all pages of an array of zeros share one page of memory until they are written
    back = _sender(transport, np.zeros(1, np.int64), 1 - root)
    there(), back()  # once before the timing, so that all pages and buffers exist
    begun_s = time.perf_counter()
    there(), back()
    return time.perf_counter() - begun_s


def _agreed(transport: Transport, number: int, root: int) -> int:
    """Return, on both ranks, the ``number`` that rank ``root`` passed to this function."""
    one = np.array([number], np.int64)
    _sender(transport, one, root)()
    return int(one[0])


def _clock(transport: Transport, rank: int, other: int) -> Clock | None:
    """Measure the difference between the clocks of the two ranks, by the fastest of 10 round trips.

    The method is the one of NTP (RFC 5905). Both ranks must call this function. The first rank gets a Clock, which says
    how far the clock of the second rank is ahead; ``other`` is the second rank's number in the job. The second rank
    gets None.
    """
    word, best = np.zeros(1, np.float64), (float("inf"), 0.0)
    ask, answer = _sender(transport, word, 0), _sender(transport, word, 1)
    for _ in range(10):
        begun_s = time.time()
        ask()
        if rank == 1:
            word[0] = time.time()
        answer()
        ended_s = time.time()
        best = min(best, (ended_s - begun_s, float(word[0]) - (begun_s + ended_s) / 2))
    return Clock(other, best[1], best[0] / 2) if rank == 0 else None


def _sender(transport: Transport, array: Any, root: int) -> Callable[[], None]:
    """Return a function that sends ``array`` (int64 or float64) from rank ``root`` to the other rank.

    Both ranks must call the returned function. It returns when the array has been sent or received.
    """
    dtype = DType.of(str(array.dtype))
    buffer = Buffer(array.__array_interface__["data"][0], array.size, dtype, array.shape, owner=array)
    return lambda: finish(transport.broadcast(buffer, root))
