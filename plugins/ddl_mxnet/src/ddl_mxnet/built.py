"""Functions such as ``mpi_built``, which scripts for Horovod call.

In Horovod, ``mpi_built`` returns whether Horovod was built with MPI. In ddl, it returns whether a transport for MPI is
installed.
"""

from __future__ import annotations

import mxnet as mx

from ddlcore.api import BuildQuestions

_ask = BuildQuestions(__name__)

mpi_built = _ask.built("mpi_built", "mpi", "MPI")
mpi_enabled = _ask.enabled("mpi_enabled", "mpi", "MPI")
mpi_threads_supported = _ask.threads_supported("mpi_threads_supported", "mpi", "MPI (by mpi4py, for example)")
gloo_built = _ask.built("gloo_built", "gloo", "Gloo")
gloo_enabled = _ask.enabled("gloo_enabled", "gloo", "Gloo")
nccl_built = _ask.built_version("nccl_built", "nccl", "NCCL", 23203)
ccl_built = _ask.built("ccl_built", "ccl", "oneCCL")
ddl_built = _ask.built("ddl_built", "ibm-ddl", "IBM's DDL", "Always False: it is not supported. Horovod scripts ask.")


def cuda_built() -> bool:
    """Return whether this MXNet was built for CUDA."""
    return bool(mx.runtime.Features().is_enabled("CUDA"))


def rocm_built() -> bool:
    """Return False, because there is no MXNet for ROCm. Scripts for Horovod call this function."""
    return False
