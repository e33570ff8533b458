"""Answers Horovod's questions about how it was built; here, they are about what is installed."""

from __future__ import annotations

import tensorflow as tf

from ddlcore.api import built, built_version, enabled, threads_supported

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """Return whether the MPI transport is installed. All functions but ``*_enabled`` may be called before ``init``."""
    return built("mpi")


def mpi_enabled() -> bool:
    """Return whether the current job communicates by MPI."""
    return enabled("mpi")


def mpi_threads_supported() -> bool:
    """Return whether the program may call MPI (by mpi4py, say) while the job runs, whatever transport the job uses.

    Every rank must call it. Raises ValueError if MPI did not start the processes, or is not installed.
    """
    return threads_supported("mpi")


def gloo_built() -> bool:
    """Return whether the Gloo transport is installed."""
    return built("gloo")


def gloo_enabled() -> bool:
    """Return whether the current job communicates by Gloo."""
    return enabled("gloo")


def nccl_built() -> int:
    """Return the version code of the loaded NCCL, such as 23203; 0 if NCCL cannot be used here."""
    return built_version("nccl")


def ddl_built() -> bool:
    """Return whether IBM's DDL library is there: always False, because it is not supported.

    Horovod's scripts call this.
    """
    return built("ibm-ddl")


def ccl_built() -> bool:
    """Return whether oneCCL is installed as a transport."""
    return built("ccl")


def cuda_built() -> bool:
    """Return whether this TensorFlow was built for CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Return whether this TensorFlow was built for ROCm."""
    return bool(tf.test.is_built_with_rocm())


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU. Both arguments are accepted for compatibility with Horovod."""
    return bool(tf.config.list_physical_devices("GPU"))
