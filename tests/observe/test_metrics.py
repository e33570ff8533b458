"""The Prometheus endpoint: what it serves, by which names, where, and that it is gone afterwards."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.commands.cli import main
from ddlcore.control.ports import free_ports
from ddlcore.job import Job
from ddlcore.observe.http import MOST_AT_ONCE
from ddlcore.observe.metrics import Exporter, Family
from ddlcore.observe.pulse import Pace
from ddlcore.testing.world import World
from ddlcore.text.installing import pip_install

pytest.importorskip("prometheus_client", reason="prometheus-client serves the metrics")


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
            assert all(re.fullmatch(r"ddl_[a-z_]+_(total|seconds)", name) for name in found)
        ddl.allreduce(x, name="end")
        return 1.0

    with World(2, settings={"metrics_port": port}) as world:
        assert world.run(body, last=True) == [1.0, 1.0]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


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
        ("free", False, f"prometheus-client is not installed; {pip_install('ddlcore[metrics]')}"),
        ("taken", True, "it is taken"),
        ("66000", True, "no port"),
    ],
)
def test_what_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, taken: int, port: str, there: bool, words: str
) -> None:
    """In one line, with exit code 2."""
    if not there:
        monkeypatch.setattr("ddlcore.commands.run.command.find", lambda name: None)
    number = {"free": str(free_ports(1)[0]), "taken": str(taken)}.get(port, port)
    assert main(["run", "-np", "2", "--metrics-port", number, "true"]) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1


def test_a_rank_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"metrics need prometheus-client; pip install .*\[metrics\]"):
        Exporter(lambda: [], {}).open("127.0.0.1", 0)


def test_the_pace_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since the last look that saw a new step."""
    now = [100.0]
    monkeypatch.setattr("ddlcore.observe.pulse.time.monotonic", lambda: now[0])
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
