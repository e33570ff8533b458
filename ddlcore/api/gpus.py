"""Decides which GPU a rank uses, from the driver's list and CUDA_VISIBLE_DEVICES, without using any GPU itself.

This module asks the driver through NVIDIA's management library (NVML). These questions create no context on a GPU, so
the process may still fork afterwards.
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

__all__ = ["Gpus", "installed_gpus", "local_device", "local_gpu", "log_once", "visible_gpus"]

log = logging.getLogger("ddl")
_logging = threading.Lock()

PROC = Path("/proc/driver/nvidia")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine, in the driver's order, with their names and UUIDs.

    Some GPUs may be divided into parts, called MIG instances. ``parts`` are the UUIDs of the existing MIG instances.
    ``divided`` are the indexes of the divided GPUs. A process can see at most one MIG instance. ``problem`` says why
    there are no GPUs; "" if there is no problem.
    """

    driver: str = ""  # version of the driver
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
    """Return how many of ``gpus`` CUDA shows to a process with the environment ``environ``.

    A MIG instance that the process sees counts as one GPU.
    """
    from ddlcore.builtin.nvml import shown  # here, because few ranks ask for GPUs

    return len(shown(environ.get(VISIBLE), gpus.uuids, gpus.parts, gpus.divided))


def local_device() -> str:
    """Return the device of this rank: ``cuda:<index>``, or ``cpu`` if the process sees no GPU.

    The index is the local rank, or 0 if the process sees only one GPU. If this host has more ranks than GPUs, the ranks
    share the GPUs in turn, and one warning names the number of ranks and of GPUs. Any thread may call this after
    ``init()``.
    """
    index = local_gpu()
    return "cpu" if index is None else f"cuda:{index}"


def local_gpu(visible: int | None = None, framework: str = "this framework") -> int | None:
    """Return the index of this rank's GPU among the GPUs that the process sees, or None if the process sees no GPU.

    ``visible``: the number of GPUs that the framework sees; None: as many as CUDA shows. ``framework``: the framework's
    name, for messages. The ``local_device`` functions of plugins call this.
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
    if job.local_rank == 0:  # one rank warns for all ranks of the host
        gpus = _shared(visible, os.environ)
        if gpus < job.local_size:
            log_once(
                logging.WARNING,
                f"{job.local_size} ranks on this host share {gpus} GPU{'s' if gpus > 1 else ''}, in turn; "
                f"start one rank for each (-np {gpus}) unless that is meant",
            )
    return job.local_rank % visible


def _shared(visible: int, environ: Mapping[str, str]) -> int:
    """Return how many GPUs all ranks of this host have together. ``visible``: how many GPUs this rank sees.

    If CUDA_VISIBLE_DEVICES shows only one GPU to this rank, other ranks may see other GPUs. In this case all GPUs of
    this host are counted.
    """
    if visible > 1 or _visible(environ) is None:
        return visible
    gpus = installed_gpus()
    return max(len(gpus.uuids) - len(gpus.divided) + len(gpus.parts), _listed(), visible)


def _visible(environ: Mapping[str, str]) -> str | None:
    return environ.get(VISIBLE)


def log_once(level: int, text: str) -> None:
    """Log ``text`` at ``level``, unless this process has already logged the same text. Any thread may call this."""
    with _logging:  # functools.cache alone would let two threads log the same text
        _log(level, text)


@cache
def _log(level: int, text: str) -> None:
    log.log(level, "%s", text)


# --- the driver


@cache
def installed_gpus() -> Gpus:
    """Return the GPUs that NVIDIA's driver reports. Each process asks the driver only once. This never raises an error.

    If the driver is missing or does not answer, the result has no GPUs, and its ``problem`` says why.
    """
    from ddlcore.builtin.nvml import LIBRARY, DriverError, load_nvml  # here, because few ranks ask for GPUs

    try:
        driver = load_nvml()
    except (DriverError, AttributeError) as error:
        return _silent(LIBRARY, error)
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
    except (DriverError, AttributeError) as error:
        return _silent(LIBRARY, error)
    finally:
        driver.close()


def _silent(library: str, error: Exception) -> Gpus:
    return Gpus(problem=f"the NVIDIA driver does not answer ({library}: {error}); try nvidia-smi")


def _listed() -> int:
    """Return how many GPUs the kernel driver lists, including GPUs that a container or a scheduler hides."""
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
