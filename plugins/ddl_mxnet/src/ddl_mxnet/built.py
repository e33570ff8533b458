"""Answers Horovod's questions about its build (``mpi_built`` and others) by what is installed here."""

from __future__ import annotations

import mxnet as mx

from ddlcore.api import built, built_version, enabled, threads_supported

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """Return whether the MPI transport is installed.

    All functions of this module may be called before ``init``, except ``*_enabled`` and ``mpi_threads_supported``.
    """
    return built("mpi")


def mpi_enabled() -> bool:
    """Return whether the current job communicates over MPI. Raises NotInitialized before ``init``."""
    return enabled("mpi")


def mpi_threads_supported() -> bool:
    """Return whether the program may call MPI, by mpi4py for example, while the job runs, whatever transport that uses.

    Every rank must call it. Raises ValueError if MPI is not installed or did not start the processes, and before
    ``init``.
    """
    return threads_supported("mpi")


def gloo_built() -> bool:
    """Return whether the Gloo transport is installed."""
    return built("gloo")


def gloo_enabled() -> bool:
    """Return whether the current job communicates over Gloo. Raises NotInitialized before ``init``."""
    return enabled("gloo")


def nccl_built() -> int:
    """Return the version code of the NCCL library, such as 23203, or 0 if NCCL cannot be used here."""
    return built_version("nccl")


def ddl_built() -> bool:
    """Return whether IBM's DDL is installed: always False, it is not supported. Horovod scripts ask for it."""
    return built("ibm-ddl")


def ccl_built() -> bool:
    """Return whether oneCCL is installed as a transport."""
    return built("ccl")


def cuda_built() -> bool:
    """Return whether this MXNet was built for CUDA."""
    return bool(mx.runtime.Features().is_enabled("CUDA"))


def rocm_built() -> bool:
    """Return whether this MXNet was built for ROCm: always False, there is no such MXNet."""
    return False
