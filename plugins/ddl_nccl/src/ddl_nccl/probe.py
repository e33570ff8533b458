"""Finds out why NCCL or CUDA cannot be used on this host, without initializing CUDA.

This module only looks for files and loads libraries. Initializing CUDA takes a second and memory of the GPU, and the
process may not fork afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

DRIVER = "libcuda.so.1"
LIBRARY = "libnccl.so.2"
DEVICES = ("nvidia[0-9]*", "dxg", "nvhost-gpu")  # below /dev: of a PC, of Linux on Windows, of a Jetson


def gpu() -> str:
    """Return why no GPU can be used here, and what to do. The result is empty if a GPU can be used."""
    if not _loads(DRIVER):
        return f"no NVIDIA driver ({DRIVER} not found); install the driver, or start the container with --gpus all"
    if not _device_files():
        return "no GPU: the driver is there, but no /dev/nvidia0; start the container with --gpus all"
    return visible(os.environ)


def _device_files() -> list[str]:
    return [str(path) for pattern in DEVICES for path in Path("/dev").glob(pattern)]


def visible(environ: Mapping[str, str]) -> str:
    """Return a message if CUDA_VISIBLE_DEVICES in ``environ`` hides every GPU. Otherwise the result is empty."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return ""
    first = listed.split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles", "none", "void"):  # CUDA ends the list at the first invalid entry
        return f"CUDA_VISIBLE_DEVICES='{listed}' hides every GPU; unset it, or name one"
    return ""


def nccl() -> str:
    """Return why NCCL cannot be used here, and what to do. The result is empty if NCCL can be used."""
    missing = gpu()
    if missing:
        return missing
    if not installed_libraries() and not _loads(LIBRARY):
        return f"no {LIBRARY}; pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12: as the framework's CUDA)"
    return ""


def installed_libraries() -> list[Path]:
    """Return the paths of the NCCL libraries that pip has installed, in the order in which Python searches."""
    return list(_wheels())


def _wheels() -> Iterator[Path]:
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia")
        for place in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(place, "nccl", "lib", LIBRARY)
            if path.exists():
                yield path


@cache
def _loads(name: str) -> bool:
    """Return whether the system's loader can load the library ``name``.

    The library stays loaded, which costs only address space.
    """
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
