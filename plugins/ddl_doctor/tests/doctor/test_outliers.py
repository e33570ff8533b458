"""Links that are much slower than the others of their kind: what is one, what is noise, and what is said of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from ddl_conform.threads import ThreadsTransport
from ddl_conform.world import World
from ddl_doctor.doctor import pairs as measuring
from ddl_doctor.doctor.links import MeasuredLinks, Pair
from ddl_doctor.doctor.outliers import judge_outliers, outliers, repeated_lines
from ddl_doctor.doctor.pairs import measure_links

from ddlcore.api.objects import allgather_object
from ddlcore.hooks import TransportProvider
from ddlcore.process.job import Job

HOSTS = {rank: f"node{rank // 2}" for rank in range(8)}  # two ranks on each host


def all_pairs(ranks: int, latency_us: float = 50.0, rate: float = 2.0, **slow: tuple[float, float]) -> list[Pair]:
    """Return both directions of all pairs. ``r0_1`` in ``slow`` gives the latency and the rate from rank 0 to rank 1."""
    found = []
    for a in range(ranks):
        for b in range(ranks):
            if a != b:
                found.append(Pair(a, b, *slow.get(f"r{a}_{b}", (latency_us, rate))))
    return found


def test_a_latency_of_25_times_its_twin_is_found() -> None:
    """Two ranks have only each other's direction to compare with."""
    links = MeasuredLinks((0, 1), {"shm": all_pairs(2, 2.0, r0_1=(50.0, 2.0))})
    (found,) = judge_outliers(links, HOSTS, {})
    assert found.check == "links" and found.where == "node0"
    assert found.what == (
        "a message of 8 bytes from rank 0 (node0) to rank 1 (node0) by shm takes 50 µs, 25 times as long as in the "
        "other direction (2 µs)"
    )
    assert "taskset" in found.fix and "each other's turn" not in found.means


def test_the_opposite_direction_counts_even_if_most_links_are_as_slow() -> None:
    """Four ranks on two cores: nearly all links took 2 ms, and one direction of one of them 81 µs."""
    links = MeasuredLinks((0, 1, 2, 3), {"gloo": all_pairs(4, 1995.0, 1.0, r2_1=(81.4, 1.0))})
    (found,) = judge_outliers(links, dict.fromkeys(range(4), "node"), {"node": 2})
    assert (
        "from rank 1 (node) to rank 2 (node) by gloo takes 1.99 ms, 25 times as long as in the other direction"
        in found.what
    )
    assert "node has 2 cores for 4 ranks, so ranks wait for each other's turn on a core" in found.means
    assert found.fix == "start as many ranks on node as there are cores, or fewer: -np, or -H HOST:SLOTS"


@pytest.mark.parametrize(
    ("usual_us", "other_us"),
    [
        (2.0, 21.0),  # ten times, but as little as it takes to wake a rank
        (50.0, 240.0),  # not five times
        (50.0, 50.0),
    ],
)
def test_what_noise_and_topology_explain_is_not_found(usual_us: float, other_us: float) -> None:
    """In worlds of any size."""
    for ranks in (2, 3, 8):
        links = MeasuredLinks(tuple(range(ranks)), {"gloo": all_pairs(ranks, usual_us, r0_1=(other_us, 2.0))})
        assert list(judge_outliers(links, dict.fromkeys(range(8), "node"), {})) == []


def test_links_of_different_kinds_are_not_compared() -> None:
    """Shared memory and a network differ by a factor of a hundred, and so do transports."""
    between = {f"r{a}_{b}": (150.0, 0.1) for a in range(4) for b in range(4) if HOSTS[a] != HOSTS[b]}
    links = MeasuredLinks(
        (0, 1, 2, 3), {"gloo": all_pairs(4, 1.5, 10.0, **between), "shm": [Pair(0, 1, 1e4), Pair(1, 0, 1e4)]}
    )
    assert list(judge_outliers(links, HOSTS, {})) == []


def test_a_bad_host_of_three_is_named() -> None:
    """Four of six links are slow, and the two others show what is usual."""
    slow = {f"r{a}_{b}": (50.0, 0.1) for a, b in ((0, 2), (2, 0), (1, 2), (2, 1))}
    links = MeasuredLinks((0, 1, 2), {"gloo": all_pairs(3, 50.0, 1.2, **slow)})
    (found,) = judge_outliers(links, {0: "node0", 1: "node1", 2: "node2"}, {})
    assert found.where == "node2"
    assert found.what == (
        "0.8 Gbit/s from rank 0 (node0) to rank 2 (node2) by gloo, 12 times less than is usual between hosts (9.6 Gbit/s), "
        "and 3 more of 6 links, all of them from or to node2"
    )
    assert "ethtool" in found.fix and "--network-interface" in found.fix


def test_a_bad_rank_of_a_host_is_named() -> None:
    """If all links are within one host, what they have in common is a rank."""
    slow = {f"r{a}_{b}": (900.0, 2.0) for a in range(4) for b in range(4) if 3 in (a, b)}
    links = MeasuredLinks((0, 1, 2, 3), {"shm": all_pairs(4, 2.0, 2.0, **slow)})
    (found,) = judge_outliers(links, dict.fromkeys(range(4), "node"), {})
    assert found.where == "rank 3" and "and 5 more of 12 links, all of them from or to rank 3" in found.what


def test_the_worst_comes_first() -> None:
    """And a link without a number is no outlier, nor is one without another of its kind."""
    pairs = all_pairs(4, 10.0, r0_1=(100.0, 2.0), r2_3=(900.0, 2.0))
    found = outliers("x", [*pairs, Pair(4, 5)], dict.fromkeys(range(8), 0))
    assert [(one.pair.a, one.pair.b) for one in found] == [(2, 3), (0, 1)]
    assert outliers("x", [Pair(0, 1, 1e6, 1e-6)], HOSTS) == []


# --- measuring again


def measured(
    monkeypatch: pytest.MonkeyPatch, times: dict[tuple[int, int], list[float]]
) -> tuple[MeasuredLinks, list[int]]:
    """Measure three ranks of one host; ``times`` holds the latencies of a link in µs, one measurement after the other.

    Return also how often each of the three pairs was measured.
    """
    opened: list[tuple[int, int]] = []

    def measure(job: Job, provider: Any, a: int, b: int, with_clock: bool, turn: int = 0) -> Any:
        if job.rank not in (a, b):
            return None
        way = (a, b) if job.rank == a else (b, a)
        if job.rank == a:
            opened.append(way)
        latencies = times.get(way, [3.0])
        return [Pair(*way, latencies[min(turn, len(latencies) - 1)], 2.0)], None, ""

    monkeypatch.setattr(measuring, "_measure", measure)
    provider = TransportProvider("threads", f"{ThreadsTransport.__module__}:ThreadsTransport", in_process=True)
    with World(3, hosts=(0, 0, 0)) as world:
        everyone = world.run(
            lambda rank, job: measure_links(job, [provider], (0, 1, 2), partial(allgather_object, job=job)), last=True
        )
    assert everyone[0] == everyone[1] == everyone[2]
    return everyone[0], [opened.count(way) for way in ((0, 1), (0, 2), (1, 2))]


def test_a_slow_moment_is_measured_again_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found, the matrix has the better value, and the report says what was measured at first."""
    links, counts = measured(monkeypatch, {(0, 1): [75.0, 3.5]})
    assert counts == [2, 1, 1]
    hosts = dict.fromkeys(range(3), "node")
    assert list(judge_outliers(links, hosts, {})) == []
    assert next(pair.latency_us for pair in links.pairs["threads"] if (pair.a, pair.b) == (0, 1)) == 3.5
    assert repeated_lines(links) == [
        "threads, rank 0 to rank 1: 75 µs and 16 Gbit/s at first; the best of several measurements counts, "
        "3.5 µs and 16 Gbit/s",
        "threads, rank 1 to rank 0: 3 µs and 16 Gbit/s at first; the best of several measurements counts, "
        "3 µs and 16 Gbit/s",
    ]


def test_a_slow_link_stays_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured three times in all, its best time counts, and it is a finding."""
    links, counts = measured(monkeypatch, {(1, 2): [90.0, 75.0, 80.0]})
    assert counts == [1, 1, 3]
    (found,) = judge_outliers(links, dict.fromkeys(range(3), "node"), {})
    assert "from rank 1 (node) to rank 2 (node) by threads takes 75 µs, 25 times as long as is usual" in found.what


def test_equal_links_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the report has no line about it."""
    links, counts = measured(monkeypatch, {(0, 1): [6.0, 3.0]})
    assert counts == [1, 1, 1] and links.repeated == {} and repeated_lines(links) == []
