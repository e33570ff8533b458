"""Finds which NCCL is loaded and which features it has.

The version is read from NCCL itself, because nccl4py's version does not determine NCCL's version.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from ddl_nccl._raw import load
from ddl_nccl.layer import Raw
from ddl_nccl.probe import LIBRARY, installed_libraries
from ddlcore.contracts.library import Library

log = logging.getLogger("ddl")
OLDEST = 21400  # the first version whose communicators take a configuration
WHEELS = "nvidia-nccl-cu"


@dataclass(frozen=True)
class Features:
    """The features of one version of NCCL, as determined by its version code."""

    version: int
    average: bool  # supports ncclAvg, which divides by the number of ranks
    bfloat16: bool

    @classmethod
    def of(cls, version: int) -> Features:
        """Return the features of the NCCL with the version code ``version``, according to NCCL's release notes."""
        return cls(version, average=version >= 21000, bfloat16=version >= 21000)

    def words(self) -> str:
        """Return a text with the names of the reduce operations that this NCCL supports."""
        return "sum, min, max, product" + (", average" if self.average else "")


def spelled(version: int) -> str:
    """Return a version code as people write it: 2.32.3 for 23203, and 2.7.8 for 2708."""
    base = 10000 if version >= 10000 else 1000
    return f"{version // base}.{version % base // 100}.{version % 100}"


def wheels() -> dict[str, str]:
    """Return a dict from the name to the version of each installed distribution that contains an NCCL."""
    found = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(WHEELS):
            found[name] = distribution.version
    return found


@cache
def overwritten() -> str:
    """Return a warning if two installed wheels contain the same library, so that one has overwritten the other.

    Otherwise the result is empty.
    """
    found = wheels()
    if len(found) < 2:
        return ""
    both = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
    return (
        f"{both} are installed in one environment, where the later has overwritten the earlier's {LIBRARY}; "
        f"pip uninstall {' '.join(sorted(found))}, then install the one of the framework's CUDA"
    )


def library(raw: Raw | None = None) -> Library | None:
    """Load the NCCL that this process would use, and return its description. Returns None if no NCCL can be loaded."""
    try:
        version = (raw or load()).version()
    except Exception as error:  # raised by the loader, by nccl4py, or by a stub of NCCL that another library brings
        log.debug("nccl: no library: %s", error)
        return None
    features = Features.of(version)
    facts = {"reduces by": features.words(), "of": _types(features)}
    place = _place()
    if place:
        facts["at"] = str(place)
    if overwritten():
        facts["but"] = overwritten()
    return Library(f"NCCL {spelled(version)}", version, facts)


def _types(features: Features) -> str:
    return "float16, bfloat16, …" if features.bfloat16 else "float16, …"


def _place() -> Path | None:
    """Return the path of the NCCL library that is loaded in this process.

    If no NCCL is loaded, return the path of the first one that pip has installed, or None if there is none.
    """
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")
            if "libnccl.so" in path[2]:
                return Path("/" + path[2])
    except OSError:
        pass
    return next(iter(installed_libraries()), None)
