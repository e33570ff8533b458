"""Define what a process says about its clock, so that another process can measure the difference of the two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reading:
    """A time read from another process's clock in ns, and the boot id of that process's machine (see ``boot_id``)."""

    now_ns: int
    boot: str


def boot_id() -> str:
    """Return an id of the present boot of this machine, or "" if the id is unknown.

    If two processes have the same id, they read the same monotonic clock.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
