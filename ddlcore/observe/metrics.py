"""Serves one rank's numbers to Prometheus; they are read when somebody asks for them, and at no other time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ddlcore.observe.http import bounded_server

__all__ = ["INSTALL", "Exporter", "Family", "families"]

INSTALL = "pip install ddlcore[metrics]"


@dataclass(frozen=True)
class Family:
    """A metric with its samples, by the values of its label; a counter's name ends in _total, as it is shown."""

    name: str
    kind: str  # "counter" or "gauge"
    doc: str
    label: str = ""
    samples: tuple[tuple[str, float], ...] = ()


def families(stats: Mapping[str, Any], step_s: float) -> list[Family]:
    """What ``ddl.stats()`` counts, by the conventions of Prometheus: base units, and totals where things add up.

    ``step_s``: what a step took, lately; 0 while that is unknown.
    """

    def total(name: str, doc: str, value: float) -> Family:
        return Family(name, "counter", doc, "", (("", value),))

    buckets = [(way, stats[f"buckets_{way}"]) for way in ("negotiated", "replayed", "void")]
    return [
        total(
            "ddl_steps_total",
            "Periods of a schedule that were launched; steps before one is found do not count.",
            stats["steps"],
        ),
        Family(
            "ddl_step_seconds", "gauge", "What a step took since the last time that this was read.", "", (("", step_s),)
        ),
        Family(
            "ddl_tensor_bytes_total",
            "counter",
            "Bytes of this rank's tensors that were handed over.",
            "operation",
            tuple(sorted(stats["bytes"].items())),
        ),
        Family(
            "ddl_buckets_total",
            "counter",
            "Buckets that ran: decided by the coordinator, replayed, or in vain.",
            "how",
            tuple(buckets),
        ),
        Family(
            "ddl_batches_total",
            "counter",
            "The former name of ddl_buckets_total; it will go in a later version.",
            "how",
            tuple(buckets),
        ),
        Family(
            "ddl_stage_seconds_total",
            "counter",
            "Seconds of the engine in each stage, and of the user's threads in wait.",
            "stage",
            tuple(sorted(stats["seconds"].items())),
        ),
        total(
            "ddl_control_messages_total",
            "To and from the coordinator; a steady step adds none.",
            stats["control_messages"],
        ),
        total(
            "ddl_commit_messages_total",
            "Between hosts, that a bucket had been launched by all.",
            stats["commit_messages"],
        ),
        total("ddl_stall_messages_total", "About what waits for too long.", stats["stall_messages"]),
        total("ddl_pulse_messages_total", "That told the launcher how this rank is.", stats["pulse_messages"]),
        total("ddl_divergences_total", "How often this rank asked to leave replay.", stats["divergences"]),
    ]


class Exporter:
    """An HTTP server in a thread of its own, from ``open`` to ``close``. ``read`` may be called at any moment."""

    def __init__(self, read: Callable[[], Iterable[Family]], labels: Mapping[str, str]) -> None:
        """``labels`` go with every sample."""
        self._read = read
        self._labels = dict(labels)
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def open(self, address: str, port: int) -> int:
        """Listens; returns the port (what 0 stood for). Raises ValueError in one line where that cannot be."""
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise ValueError(f"metrics need prometheus-client; {INSTALL}") from None
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
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        return int(self._server.server_port)

    def close(self) -> None:
        """Whoever is being answered gets the answer; the port is free after it. Idempotent."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(2.0)

    def collect(self) -> Iterable[Any]:
        """Called by Prometheus' library at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        own = list(self._labels)
        for family in self._read():
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            labels = [*own, *([family.label] if family.label else [])]
            made = kind(family.name, family.doc, labels=labels)
            for value, number in family.samples:
                made.add_metric([*self._labels.values(), *([value] if family.label else [])], number)
            yield made
