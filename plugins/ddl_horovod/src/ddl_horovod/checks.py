"""The check of `ddl doctor` for Horovod: it reports the original, whose packages have the names of those of ddl-horovod."""

from __future__ import annotations

from ddl_horovod.original import INSTEAD
from ddlcore.contracts.known_bad import KnownBad, KnownBadCheck, installed


class KnownBadHorovod(KnownBadCheck):
    """A check that the original Horovod is not in an environment with ddl-horovod."""

    name = "known-bad-horovod"
    completes = "known-bad"
    rows = (
        KnownBad(
            "horovod-twice",
            installed("horovod", lambda version: True),
            "it shares the folder `horovod` with ddl-horovod, so a program may load parts of both",
            INSTEAD,
        ),
    )
