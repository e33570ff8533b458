"""Decides which GPU is a rank's own, from what the driver says and CUDA_VISIBLE_DEVICES leaves; touches none of them.

The driver is asked through its management library, which begins no context: a process may still fork afterwards.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ddlcore.api.world import current_job
from ddlcore.builtin.nvml import LIBRARY, Refused, load_nvml, shown

__all__ = ["Gpus", "installed_gpus", "local_device", "local_gpu", "log_once", "visible_gpus"]

log = logging.getLogger("ddl")
_logging = threading.Lock()

PROC = Path("/proc/driver/nvidia")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine, in the driver's order; of each its name and UUID.

    ``parts`` are the UUIDs of the MIG instances that exist, ``divided`` of which GPUs. A process sees one of them at most.
    ``problem`` says why there are none.
    """

    driver: str = ""  # its version
    names: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    divided: tuple[int, ...] = ()  # indexes
    problem: str = ""

    def __str__(self) -> str:
        if not self.uuids:
            return f"none: {self.problem or 'the driver knows none'}"
        kinds = ", ".join(f"{self.names.count(name)} x {name}" for name in dict.fromkeys(self.names))
        parts = f", {len(self.parts)} MIG instances" if self.parts else ""
        return f"{kinds}{parts}, driver {self.driver or 'unknown'}"


def visible_gpus(gpus: Gpus, environ: Mapping[str, str]) -> int:
    """How many of ``gpus``, or of their MIG instances one, CUDA shows to a process with this environment."""
    return len(shown(environ.get(VISIBLE), gpus.uuids, gpus.parts, gpus.divided))


def local_device() -> str:
    """The device that is this rank's own: ``cuda:<local rank>``; ``cuda:0`` where it sees one GPU alone; else ``cpu``.

    After ``init()``; any thread. Where more ranks than GPUs are on this host, the ranks take them in turn, and one
    warning tells both numbers.
    """
    index = local_gpu()
    return "cpu" if index is None else f"cuda:{index}"


def local_gpu(visible: int | None = None, framework: str = "this framework") -> int | None:
    """The index, as this process counts, of the GPU that is this rank's own; None where it sees none.

    ``visible``: how many the framework sees; None: as many as CUDA would show. For plugins' ``local_device``.
    """
    job = current_job()
    shown = visible_gpus(installed_gpus(), os.environ)
    if visible is None:
        visible = shown
    if visible == 0:
        if shown:
            text = f"{framework} sees no GPU, though CUDA shows {shown}: is it built for CUDA? This rank uses the CPU"
            log_once(logging.WARNING, text)
        elif installed_gpus().uuids:
            text = f"{VISIBLE}={_visible(os.environ)!r} names no GPU of this host ({installed_gpus()}): this rank uses the CPU"
            log_once(logging.WARNING, text)
        return None
    if job.local_rank == 0:  # one of the host speaks for all
        gpus = _shared(visible, os.environ)
        if gpus < job.local_size:
            log_once(
                logging.WARNING,
                f"{job.local_size} ranks on this host share {gpus} GPU{'s' if gpus > 1 else ''}, in turn; "
                f"start one rank for each (-np {gpus}) unless that is meant",
            )
    return job.local_rank % visible


def _shared(visible: int, environ: Mapping[str, str]) -> int:
    """How many GPUs this host's ranks have together. One that is named to a rank may be that rank's alone."""
    if visible > 1 or _visible(environ) is None:
        return visible
    gpus = installed_gpus()
    return max(len(gpus.uuids) - len(gpus.divided) + len(gpus.parts), _listed(), visible)


def _visible(environ: Mapping[str, str]) -> str | None:
    return environ.get(VISIBLE)


def log_once(level: int, text: str) -> None:
    """Logs ``text`` the first time that this process has it to say. Any thread."""
    with _logging:  # a cache by itself lets two threads in
        _log(level, text)


@cache
def _log(level: int, text: str) -> None:
    log.log(level, "%s", text)


# --- the driver


@cache
def installed_gpus() -> Gpus:
    """What NVIDIA's driver says; asked once a process. Never raises."""
    try:
        driver = load_nvml()
    except (Refused, AttributeError) as error:
        return _silent(error)
    except OSError:
        count = _listed()
        if not count:
            return Gpus(problem=f"no NVIDIA driver ({LIBRARY} cannot be loaded)")
        return Gpus(_proc_version(), ("NVIDIA GPU",) * count, tuple(f"GPU-{i}" for i in range(count)))
    try:
        found = driver.inventory()
        names, uuids = tuple(name for name, _, _ in found), tuple(uuid for _, uuid, _ in found)
        parts = tuple(part for _, _, mine in found for part in mine)
        return Gpus(driver.driver(), names, uuids, parts, tuple(i for i, (_, _, mine) in enumerate(found) if mine))
    except (Refused, AttributeError) as error:
        return _silent(error)
    finally:
        driver.close()


def _silent(error: Exception) -> Gpus:
    return Gpus(problem=f"the NVIDIA driver does not answer ({LIBRARY}: {error}); try nvidia-smi")


def _listed() -> int:
    """How many GPUs the kernel's driver has, those included that a container or a scheduler keeps from us."""
    try:
        return len(list((PROC / "gpus").iterdir()))
    except OSError:
        return 0


def _proc_version() -> str:
    try:
        words = (PROC / "version").read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdecimal() and "." in word), "")
