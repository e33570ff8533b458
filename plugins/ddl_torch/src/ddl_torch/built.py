"""Horovod's questions about what it was built with; here they are about what is installed."""

from __future__ import annotations

import torch

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
    """Whether the MPI transport is installed. All but ``*_enabled`` may be called before ``init``."""
    return built("mpi")


def mpi_enabled() -> bool:
    """Whether the present job communicates by MPI."""
    return enabled("mpi")


def mpi_threads_supported() -> bool:
    """Whether the program may call MPI (by mpi4py, say) while the job runs, whatever transport that uses.

    ValueError where MPI did not start the processes, or is not installed. Every rank calls it.
    """
    return threads_supported("mpi")


def gloo_built() -> bool:
    """Whether the Gloo transport is installed."""
    return built("gloo")


def gloo_enabled() -> bool:
    """Whether the present job communicates by Gloo."""
    return enabled("gloo")


def nccl_built() -> int:
    """The version code of the NCCL that is loaded, such as 23203; 0 where NCCL could not be used here."""
    return built_version("nccl")


def ddl_built() -> bool:
    """Whether IBM's DDL is there: never, it is not supported. Horovod's scripts ask."""
    return built("ibm-ddl")


def ccl_built() -> bool:
    """Whether oneCCL is installed as a transport."""
    return built("ccl")


def cuda_built() -> bool:
    """Whether this PyTorch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch was built for ROCm."""
    return torch.version.hip is not None
