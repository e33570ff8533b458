"""Answers the questions that scripts ask about Horovod's build (``mpi_built`` and others).

The answers depend on the plugins and libraries that are installed on this host.
"""

from __future__ import annotations

import tensorflow as tf

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
    """Return whether this TensorFlow was built for CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Return whether this TensorFlow was built for ROCm."""
    return bool(tf.test.is_built_with_rocm())


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU. Both arguments are accepted for compatibility with Horovod."""
    return bool(tf.config.list_physical_devices("GPU"))
