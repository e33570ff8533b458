"""The Prometheus endpoint: what it serves, by which names, where, and that it is gone afterwards."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
from ddl_conform.world import World
from ddl_prometheus.bounded_server import MOST_AT_ONCE, bounded_server, end_server
from ddl_prometheus.exporter import Exporter, Family, Pace, PatientExporter

import ddlcore as ddl
from ddlcore.api.elastic import ObjectState, run
from ddlcore.commands.cli import main
from ddlcore.control.ports import free_ports
from ddlcore.process.job import Job
from tests.api.elastic.threads import ElasticThreads, Killed

T = TypeVar("T")


def scrape(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """By name of a sample its values by labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_a_world_s_first_rank_serves() -> None:
    """One endpoint a host, of its local rank 0; the numbers are those of ``stats()``, and go on."""
    port = free_ports(1)[0]

    def body(rank: int, job: Job) -> float:
        x = np.ones(64, np.float32)
        for _ in range(12):
            ddl.allreduce(x, name="x")
        if rank == 0:
            found = scrape(port)
            stats = job.stats()
            mine = (("rank", "0"), ("size", "2"))

            def labels(name: str, value: str) -> tuple[tuple[str, str], ...]:
                return ((name, value), *mine)

            assert found["ddl_steps_total"][mine] == stats["steps"] > 0
            assert found["ddl_control_messages_total"][mine] == stats["control_messages"]
            assert found["ddl_buckets_total"][labels("how", "replayed")] == stats["buckets_replayed"]
            assert found["ddl_tensor_bytes_total"][labels("operation", "allreduce")] == 12 * 256
            stages = {dict(labels)["stage"] for labels in found["ddl_stage_seconds_total"]}
            assert stages == set(stats["seconds"]) >= {"idle", "transport", "user"}
            assert all(re.fullmatch(r"ddl_[a-z_]+_(total|seconds|size|generation)", name) for name in found)
            assert (found["ddl_world_generation"][mine], found["ddl_world_size"][mine]) == (1, 2)
            assert found["ddl_ranks_lost_total"][mine] == found["ddl_world_seconds_lost_total"][mine] == 0
        ddl.allreduce(x, name="end")
        return 1.0

    with World(2, settings={"metrics_port": port}) as world:
        assert world.run(body, last=True) == [1.0, 1.0]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


def until(found: Callable[[], T | None], what: str) -> T:
    """Return what ``found`` returns when it is not None any more."""
    deadline_s = time.monotonic() + 50
    while time.monotonic() < deadline_s:
        try:
            value = found()
        except OSError:  # nobody serves while the ranks form another world
            value = None
        if value is not None:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come")


def test_metrics_of_an_elastic_job() -> None:
    """The first rank of its host serves, and dies: the next one does, until another process is back in its place.

    All metrics of the job are right on the new process, too, and no counter of a survivor goes backwards.
    """
    port = free_ports(1)[0]
    die, end = threading.Event(), threading.Event()
    stats: dict[int, list[Any]] = {place: [] for place in range(3)}

    def play(place: int) -> dict[str, Any]:
        @run
        def train(state: Any) -> dict[str, Any]:
            while True:
                flags = ddl.allreduce(np.array([float(end.is_set()), 1.0]), name="x", op=ddl.Max)
                stats[place].append(ddl.stats())
                if flags[0]:
                    return dict(ddl.stats()["world"])
                if place == 0 and die.is_set() and ddl.stats()["world"]["ranks_lost"] == 0:
                    raise Killed(again=True)
                state.commit()

        return train(ObjectState())

    def served(joined: int) -> Callable[[], dict[str, float] | None]:
        """Return what the metrics are, without their labels, if so many ranks have joined."""

        def look() -> dict[str, float] | None:
            found = {name: next(iter(values.items())) for name, values in scrape(port).items()}
            ranks.append(dict(found["ddl_world_size"][0]))
            values = {name: value for name, (_, value) in found.items()}
            return values if values["ddl_ranks_joined_total"] == joined else None

        return look

    ranks: list[dict[str, str]] = []
    world = ElasticThreads(3, play, metrics_port=port)
    results: dict[int, Any] = {}
    playing = threading.Thread(target=lambda: results.update(world.play()))
    playing.start()
    try:
        first = until(served(0), "the first world")
        assert (first["ddl_world_size"], first["ddl_ranks_lost_total"], first["ddl_ranks_joined_total"]) == (3, 0, 0)
        assert ranks[-1] == {"rank": "0"}, "the size would end the series at each change"
        die.set()
        last = until(served(1), "the lost rank to be back")
        assert (last["ddl_world_size"], last["ddl_ranks_lost_total"], last["ddl_ranks_joined_total"]) == (3, 1, 1)
        assert last["ddl_world_seconds_lost_total"] > 0 and ranks[-1] == {"rank": "0"}
    finally:
        end.set()
        die.set()
        playing.join(60)
    assert results[0] == results[1] == results[2], results
    assert results[0]["seconds_lost"] == last["ddl_world_seconds_lost_total"]
    assert results[0]["generation"] == last["ddl_world_generation"] in (2, 3), "3 if it is not back at once"
    for place in (1, 2):
        for before, after in itertools.pairwise(stats[place]):
            for key in ("control_messages", "steps", "buckets_negotiated", "buckets_replayed", "divergences"):
                assert before[key] <= after[key], (key, before, after)
            assert before["bytes"]["allreduce"] < after["bytes"]["allreduce"], "one bucket a step"
            assert before["seconds"]["user"] <= after["seconds"]["user"]
        assert stats[place][-1]["bytes"]["allreduce"] >= 16 * len(stats[place])


def test_a_port_that_becomes_free_later(taken: int, caplog: pytest.LogCaptureFixture) -> None:
    """As when a lost rank's data loader still has the socket: a warning, and the metrics come by themselves."""
    exporter = Exporter(lambda: [Family("ddl_x", "gauge", "A number.", "", (("", 1.0),))], {})
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        one = PatientExporter(exporter, "127.0.0.1", port)
    try:
        assert f"metrics cannot be served at 127.0.0.1:{port}" in caplog.text and "tried again" in caplog.text
        assert until(lambda: scrape(port), "the metrics")["ddl_x"] == {(): 1.0}
    finally:
        one.close()
    PatientExporter(Exporter(list, {}), "127.0.0.1", taken).close()  # before it could be opened


def test_the_port_is_free_although_a_forked_process_still_has_the_socket() -> None:
    """As a persistent worker of a data loader does: the next world serves at the same port."""
    first = Exporter(lambda: [Family("ddl_x", "gauge", "A number.", "", (("", 1.0),))], {})
    port = first.open("127.0.0.1", 0)
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begun, b"x")
        signal.pause()
        os._exit(0)
    second = Exporter(lambda: [Family("ddl_x", "gauge", "A number.", "", (("", 2.0),))], {})
    try:
        os.read(ready, 1)
        first.close()
        assert second.open("127.0.0.1", port) == port
        assert scrape(port)["ddl_x"] == {(): 2.0}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        second.close()
        for fd in (ready, begun):
            os.close(fd)


def test_a_server_ends_at_once() -> None:
    """Ranks of an elastic job wait for it before they form another world. This one would look after ten minutes only."""
    server = bounded_server("127.0.0.1", 0, lambda environ, start: [])
    serving = threading.Thread(target=server.serve_forever, args=(600.0,), daemon=True)
    serving.start()
    end_server(server)
    serving.join(20)
    assert not serving.is_alive()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_a_port_that_is_taken(taken: int) -> None:
    """Named, with what to change; no socket stays."""
    with pytest.raises(ValueError, match=rf"metrics cannot be served at 127\.0\.0\.1:{taken}: .*--metrics-port"):
        Exporter(lambda: [], {}).open("127.0.0.1", taken)


def test_what_is_no_port() -> None:
    """Named too: a rank that `ddl run` did not start reads its settings itself."""
    with pytest.raises(ValueError, match=r"metrics cannot be served at 127\.0\.0\.1:66000: that is no port"):
        Exporter(lambda: [], {}).open("127.0.0.1", 66000)


def test_only_where_it_is_told() -> None:
    """Bound to loopback; nothing is read before somebody asks; closed twice."""
    reads: list[int] = []

    def read() -> list[Family]:
        reads.append(1)
        return [Family("ddl_x_total", "counter", "Of x.", "kind", (("a", 1.0), ("b", 2.0)))]

    exporter = Exporter(read, {"rank": "3"})
    port = exporter.open("127.0.0.1", 0)
    try:
        assert reads == []
        assert scrape(port) == {
            "ddl_x_total": {(("kind", "a"), ("rank", "3")): 1.0, (("kind", "b"), ("rank", "3")): 2.0}
        }
        assert reads == [1]
        with socket.socket() as other:
            other.bind(("127.0.0.2", port))  # it would be taken if it listened everywhere
    finally:
        exporter.close()
        exporter.close()


@pytest.mark.parametrize(
    ("port", "there", "words"),
    [
        ("free", False, "prometheus_client not installed; pip install prometheus-client"),
        ("taken", True, "it is taken"),
        ("66000", True, "no port"),
    ],
)
def test_what_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, taken: int, port: str, there: bool, words: str
) -> None:
    """In one line, with exit code 2."""
    if not there:
        monkeypatch.setattr("ddlcore.plug.registry.find", lambda name: None)
    number = {"free": str(free_ports(1)[0]), "taken": str(taken)}.get(port, port)
    assert main(["run", "-np", "2", "--metrics-port", number, "true"]) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1


def test_the_pace_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since the last look that saw a new step."""
    now = [100.0]
    monkeypatch.setattr("ddl_prometheus.exporter.time.monotonic", lambda: now[0])
    pace = Pace()
    for at, steps, expected in ((101.0, 0, 0.0), (103.0, 4, 0.5), (104.0, 4, 0.5), (105.0, 8, 0.5)):
        now[0] = at
        assert pace.step_s(steps) == expected


def test_a_flood_of_connections_is_bounded() -> None:
    """Whoever opens many and says nothing does not fill a training's process with threads, nor keep others from an answer."""
    exporter = Exporter(lambda: [Family("ddl_x", "gauge", "A number.", "", (("", 1.0),))], {})
    port = exporter.open("127.0.0.1", 0)
    before = threading.active_count()
    idle = []
    try:
        for i in range(200):
            idle.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            if i % 50 == 49:
                assert scrape(port)["ddl_x"]
        most = before + 2 * MOST_AT_ONCE  # those sent away are ending
        deadline = time.monotonic() + 20
        while threading.active_count() > most and time.monotonic() < deadline:
            time.sleep(0.05)
        assert threading.active_count() <= most
    finally:
        for one in idle:
            one.close()
        exporter.close()
