"""Finds a kernel's compiled code in the cache on disk, or has the kernel compiled and stores the code there.

This module does not look into the code.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from ddl_nccl.cuda.names import Name
from ddlcore import contracts
from ddlcore.contracts.cache import alone, cache_directories, find, keep

SOURCES = ("compile.py", "elements.py", "kernels.py", "names.py", "primitives.py")
PACKAGES = (
    "numba",
    "numba-cuda",
    "llvmlite",
    "nvidia-nvvm",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12",
)
COMPILE_S = 120.0  # how long to wait while another process compiles
_COMPILING: Final = threading.Lock()


@functools.cache
def _key() -> str:
    """Return a key that changes whenever the sources of the kernels or the compiler change."""
    digest = hashlib.sha256()
    for source in (
        *(Path(__file__).with_name(name) for name in SOURCES),
        Path(contracts.__file__).with_name("elements.py"),
    ):
        digest.update(source.read_bytes())
    for package in PACKAGES:
        try:
            digest.update(f"{package}={version(package)};".encode())
        except PackageNotFoundError:
            continue
    return digest.hexdigest()[:16]


def obtain(name: Name, capability: tuple[int, int], cache_dir: str = "") -> bytes:
    """Return the compiled code of the kernel ``name``, which CUDA's driver can load. Any thread may call this function.

    ``capability`` is the device's compute capability, such as (9, 0). If ``cache_dir`` is empty, the default cache
    directory is used. The first caller on a machine compiles the kernel, which takes one or two seconds. Raises
    NoCompiler if the code is not in the cache and there is no compiler.
    """
    file = f"cuda-{_key()}-sm{capability[0]}{capability[1]}-{name}.bin"
    image = find(file, cache_directories(cache_dir))
    if image is not None:
        return image
    with _COMPILING, alone(cache_directories(cache_dir), COMPILE_S):
        image = find(file, cache_directories(cache_dir))
        if image is not None:  # another thread or process has compiled it meanwhile
            return image
        from ddl_nccl.cuda.compile import compile_image

        image = compile_image(name, capability)
        keep(file, image, cache_directories(cache_dir))
    return image
