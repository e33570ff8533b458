"""The check of `ddl doctor` for MXNet: it reports a version of numpy with which the installed MXNet does not work."""

from __future__ import annotations

from ddlcore.contracts.check import HostView
from ddlcore.contracts.known_bad import KnownBad, KnownBadCheck, installed, numbers

_before_1_9_1 = installed("mxnet", lambda version: version < (1, 9, 1))


def _new_numpy(host: HostView) -> str:
    numpy = host.distributions.get("numpy", "0")
    found = _before_1_9_1(host)
    return f"{found} beside numpy {numpy}" if found and numbers(numpy) >= (1, 24) else ""


class KnownBadMxnet(KnownBadCheck):
    """A check that the installed versions of MXNet and numpy work together."""

    name = "known-bad-mxnet"
    completes = "known-bad"
    rows = (
        KnownBad(
            "mxnet-numpy",
            _new_numpy,
            "MXNet before 1.9.1 uses numpy.bool, which numpy removed in 1.24, so MXNet cannot be imported",
            "pip install 'mxnet>=1.9.1' or pip install 'numpy<1.24'",
        ),
    )
