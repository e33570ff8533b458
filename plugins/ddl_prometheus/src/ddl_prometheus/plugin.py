"""Describe what ddl_prometheus adds, as plain data: an observer of ranks, and its settings."""

from __future__ import annotations

from ddlcore.hooks import ObserverProvider, Setting, hookimpl

SETTINGS = (
    Setting(
        "metrics_port",
        int,
        0,
        "port at which the first rank of each host serves metrics to Prometheus; 0: none",
        minimum=0,
        group="output",
    ),
    Setting(
        "metrics_address",
        str,
        "127.0.0.1",
        "address at which metrics are served; 0.0.0.0: all addresses of the host, so that other hosts can read them",
        group="output",
    ),
)


@hookimpl
def ddl_observers() -> list[ObserverProvider]:
    """Return the provider of the metrics of a rank."""
    return [
        ObserverProvider(
            "metrics",
            "ddl_prometheus.exporter:Metrics",
            requires=("prometheus_client",),
            install="pip install prometheus-client",
            settings=SETTINGS,
            setting="metrics_port",
            doc="serves the numbers of a rank to Prometheus",
        )
    ]
