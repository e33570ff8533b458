"""The check for `ddl doctor` that finds an MPI release with a known fault: the release hangs."""

from __future__ import annotations

import re

from ddlcore.contracts.check import HostView
from ddlcore.contracts.known_bad import KnownBad, KnownBadCheck


def _open_mpi(host: HostView) -> str:
    said = re.search(r"Open MPI\)? v?(\d+\.\d+\.\d+)", host.output("mpirun", "--version"))
    return f"Open MPI {said[1]}" if said is not None and said[1] == "3.1.3" else ""


class KnownBadMpi(KnownBadCheck):
    """The check that finds MPI releases with known faults, by the version that the mpirun on the rank's PATH prints."""

    name = "known-bad-mpi"
    completes = "known-bad"
    rows = (
        KnownBad(
            "openmpi-3.1.3",
            _open_mpi,
            "Open MPI 3.1.3 may hang in collectives that worked a minute before",
            "use Open MPI 3.1.2, or 4.0.0 and later: pip install 'openmpi>=5'",
        ),
    )
