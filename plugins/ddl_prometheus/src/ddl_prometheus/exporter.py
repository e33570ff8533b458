"""Serve the metrics of one rank to Prometheus. The metrics are computed only when a client requests them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ddl_prometheus.bounded_server import bounded_server, end_server
from ddlcore.config.loading import Settings
from ddlcore.control.ports import is_free
from ddlcore.process.observers import ObservedRank, RankObserver
from ddlcore.threads import OwnThread

log = logging.getLogger("ddl")
RETRY_S = 1.0  # after so long a PatientExporter tries again to open


@dataclass(frozen=True)
class Family:
    """A metric with its samples, one for each value of its label.

    ``name`` is the name that Prometheus shows; the name of a counter ends in _total. ``label`` is "" if the metric has
    no label.
    """

    name: str
    kind: str  # "counter" or "gauge"
    doc: str
    label: str = ""
    samples: tuple[tuple[str, float], ...] = ()


_COUNTED = (  # counters: their name, what they count, and their keys in ``ddl.stats()``
    ("ddl_steps_total", "Steps that ran by replay; steps before a schedule is found do not count.", ("steps",)),
    (
        "ddl_control_messages_total",
        "Control messages to and from the coordinator; a replayed step adds none.",
        ("control_messages",),
    ),
    (
        "ddl_commit_messages_total",
        "Messages by which hosts confirm to each other that they have launched buckets.",
        ("commit_messages",),
    ),
    ("ddl_stall_messages_total", "Messages about operations that wait for too long.", ("stall_messages",)),
    ("ddl_pulse_messages_total", "Messages with this rank's load and progress.", ("pulse_messages",)),
    ("ddl_divergences_total", "How often this rank asked to leave replay.", ("divergences",)),
    ("ddl_ranks_lost_total", "Processes of the job that have failed.", ("world", "ranks_lost")),
    ("ddl_ranks_joined_total", "Processes that were let in after the first world began.", ("world", "ranks_joined")),
    (
        "ddl_world_seconds_lost_total",
        "Seconds for which the training stood still while ranks formed another world.",
        ("world", "seconds_lost"),
    ),
)
_GAUGED = (
    ("ddl_world_generation", "Number of the present world of an elastic job.", ("world", "generation")),
    ("ddl_world_size", "Number of ranks that train together now.", ("world", "size")),
)


def families(stats: Mapping[str, Any], step_s: float) -> list[Family]:
    """Return the metrics of a rank, computed from ``stats``, the result of ``ddl.stats()``.

    The metrics follow the conventions of Prometheus: base units, and totals. ``step_s`` is the recent duration of a
    step in seconds, or 0 if it is not known.
    """

    def value(keys: tuple[str, ...]) -> float:
        found: Any = stats
        for key in keys:
            found = found[key]
        return found  # type: ignore[no-any-return]

    ways = tuple((way, stats[f"buckets_{way}"]) for way in ("negotiated", "replayed", "void"))
    nbytes, seconds = tuple(sorted(stats["bytes"].items())), tuple(sorted(stats["seconds"].items()))
    step = (("", step_s),)
    return [
        Family("ddl_step_seconds", "gauge", "Mean duration of a step since this was last read.", "", step),
        *(Family(name, "counter", doc, "", (("", value(keys)),)) for name, doc, keys in _COUNTED),
        *(Family(name, "gauge", doc, "", (("", value(keys)),)) for name, doc, keys in _GAUGED),
        Family(
            "ddl_tensor_bytes_total",
            "counter",
            "Bytes of this rank's tensors in buckets that were delivered.",
            "operation",
            nbytes,
        ),
        Family(
            "ddl_buckets_total",
            "counter",
            "Buckets that ran: negotiated with the coordinator, replayed, or void.",
            "how",
            ways,
        ),
        Family(
            "ddl_stage_seconds_total",
            "counter",
            "Seconds that the engine spent in each stage, and the user's threads in wait.",
            "stage",
            seconds,
        ),
    ]


class Metrics(RankObserver):
    """Serves the metrics of the first rank of each host. On other ranks it does nothing."""

    @classmethod
    def check(cls, settings: Settings, here: bool) -> None:
        port = settings.whole("metrics_port")
        if port > 65535 or (here and not is_free(port)):
            raise ValueError(
                f"--metrics-port {port}: {'that is no port number' if port > 65535 else 'it is taken'}; choose another"
            )

    def __init__(self, rank: ObservedRank) -> None:
        self._exporter: Exporter | PatientExporter | None = None
        place = rank.settings.text("metrics_address"), rank.settings.whole("metrics_port")
        # Prometheus begins a new series when a label changes. In an elastic job, the size and the rank in the world change
        # from world to world, so they cannot be labels there.
        if rank.report is not None and rank.local_rank == 0:  # the host's first rank may be lost or not here yet
            exporter = Exporter(_reader(rank), {"rank": str(rank.launched.rank)})
            self._exporter = PatientExporter(exporter, *place)
        elif rank.report is None and rank.launched.local_rank == 0:
            exporter = Exporter(_reader(rank), {"rank": str(rank.rank), "size": str(rank.size)})
            exporter.open(*place)
            self._exporter = exporter

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()


def _reader(rank: ObservedRank) -> Callable[[], list[Family]]:
    pace, lock = Pace(), threading.Lock()

    def read() -> list[Family]:
        with lock:  # two clients may scrape at the same time
            return families(rank.stats(), pace.step_s(rank.stats_of_world()["steps"]))

    return read


class Exporter:
    """An HTTP server for the metrics that ``read`` returns.

    The server runs in a separate thread from ``open`` to ``close``. Threads of the server may call ``read`` at any
    time.
    """

    def __init__(self, read: Callable[[], Iterable[Family]], labels: Mapping[str, str]) -> None:
        """Create an exporter that adds the labels in ``labels`` (name and value) to every sample."""
        self._read = read
        self._labels = dict(labels)
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def open(self, address: str, port: int) -> int:
        """Listen at ``address`` and ``port``, and return the port. If ``port`` is 0, the system chooses the port.

        Raises ValueError, with a message of one line, if the address or the port cannot be used.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server = bounded_server(address, port, make_wsgi_app(registry))
        except OSError as error:
            raise ValueError(
                f"metrics cannot be served at {address}:{port}: {error.strerror}; choose another --metrics-port"
            ) from None
        except OverflowError:
            raise ValueError(
                f"metrics cannot be served at {address}:{port}: that is no port; up to 65535 are"
            ) from None
        self._thread = OwnThread(target=self._server.serve_forever, name="metrics")
        self._thread.start()
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop the server after it has answered the requests in progress. The port is then free.

        Further calls do nothing.
        """
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            end_server(server)
            self._thread.join(2.0)

    def collect(self) -> Iterable[Any]:
        """Yield the metrics as objects of the library prometheus_client. The library calls this at each request."""
        own = list(self._labels)
        for family in self._read():
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            labels = [*own, *([family.label] if family.label else [])]
            made = kind(family.name, family.doc, labels=labels)
            for value, number in family.samples:
                made.add_metric([*self._labels.values(), *([value] if family.label else [])], number)
            yield made


class PatientExporter:
    """An exporter that opens as soon as its port is free.

    In an elastic job, the port may be taken for some seconds by what a lost rank has left, such as the workers of its
    data loader, and a world must not fail because of its metrics.
    """

    def __init__(self, exporter: Exporter, address: str, port: int) -> None:
        """Open ``exporter`` at ``address`` and ``port``: now, or else in a thread that tries it until ``close``."""
        self._exporter = exporter
        self._place = address, port
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            exporter.open(address, port)
        except ValueError as error:
            log.warning("%s; it is tried again every %g s", error, RETRY_S)
            self._thread = OwnThread(target=self._open, name="ddl-metrics")
            self._thread.start()

    def close(self) -> None:
        """Stop serving, or trying. Further calls do nothing."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()  # it never waits for anybody
        self._exporter.close()

    def _open(self) -> None:
        while not self._over.wait(RETRY_S):
            with contextlib.suppress(ValueError):
                self._exporter.open(*self._place)
                return


class Pace:
    """A meter that computes the duration of a step from the number of steps at successive calls.

    Only one thread at a time may call its method.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._at_s = time.monotonic()
        self._step_s = 0.0

    def step_s(self, steps: int) -> float:
        """Return the mean duration in seconds of the latest steps, or 0 before the first step.

        ``steps`` is the number of steps so far. The latest steps are those since the previous call with a new number.
        """
        now_s = time.monotonic()
        if steps > self._steps:
            self._step_s = (now_s - self._at_s) / (steps - self._steps)
        if steps != self._steps or not self._step_s:
            self._steps, self._at_s = steps, now_s
        return self._step_s
