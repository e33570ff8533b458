"""Says what keeps NCCL or CUDA from being used on this host, by looking for files: nothing is initialised.

Initialising CUDA takes a second and memory of the GPU, and forbids the process to fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

__all__ = ["LIBRARY", "gpu", "installed_libraries", "nccl", "visible"]

DRIVER = "libcuda.so.1"
LIBRARY = "libnccl.so.2"
DEVICES = ("nvidia[0-9]*", "dxg", "nvhost-gpu")  # below /dev: a PC's, Windows' Linux', a Jetson's


def gpu() -> str:
    """What keeps a GPU from being used here, with what to do; empty where nothing does."""
    if not _loads(DRIVER):
        return f"no NVIDIA driver ({DRIVER} not found); install the driver, or start the container with --gpus all"
    if not _device_files():
        return "no GPU: the driver is there, but no /dev/nvidia0; start the container with --gpus all"
    return visible(os.environ)


def _device_files() -> list[str]:
    return [str(path) for pattern in DEVICES for path in Path("/dev").glob(pattern)]


def visible(environ: Mapping[str, str]) -> str:
    """Whether these variables hide every GPU: what to say of it, else empty."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return ""
    first = listed.split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles", "none", "void"):  # CUDA ends the list at the first that makes no sense
        return f"CUDA_VISIBLE_DEVICES='{listed}' hides every GPU; unset it, or name one"
    return ""


def nccl() -> str:
    """What keeps NCCL from being used here, with what to do; empty where nothing does."""
    missing = gpu()
    if missing:
        return missing
    if not installed_libraries() and not _loads(LIBRARY):
        return f"no {LIBRARY}; pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12: as the framework's CUDA)"
    return ""


def installed_libraries() -> list[Path]:
    """The NCCLs that pip has installed where this Python looks, in the order in which it does."""
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
    """Whether the system's loader finds the library. It stays loaded, which costs address space only."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
