"""The check for `ddl doctor` that finds several distributions of TensorFlow installed side by side."""

from __future__ import annotations

from ddlcore.contracts.check import HostView
from ddlcore.contracts.known_bad import KnownBad, KnownBadCheck

NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")


def _several(host: HostView) -> str:
    found = [f"{name} {host.distributions[name]}" for name in NAMES if name in host.distributions]
    return " beside ".join(found) if len(found) > 1 else ""


class KnownBadTensorFlow(KnownBadCheck):
    """The check that finds combinations of installed TensorFlow distributions that are known not to work."""

    name = "known-bad-tensorflow"
    completes = "known-bad"
    rows = (
        KnownBad(
            "two-tensorflows",
            _several,
            "they install the same files over each other; which one is imported depends on who came last",
            "pip uninstall -y tensorflow tensorflow-cpu tensorflow-gpu, then install one of them",
        ),
    )
