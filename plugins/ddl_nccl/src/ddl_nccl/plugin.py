"""Describes ddl_nccl to the core without importing NCCL's bindings or numba."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddlcore.hooks import CheckProvider, KernelsProvider, Setting, TransportProvider, hookimpl

INSTALL = "pip install 'ddl-nccl[cu13]' (or [cu12]: as the framework's CUDA)"


def one_each(environ: Mapping[str, str]) -> bool:
    """Return whether each rank needs a GPU of its own.

    With NCCL 2.30 or later, ranks may share a GPU if ``environ`` has NCCL_MULTI_RANK_GPU_ENABLE=1.
    """
    return environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1"


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Return the description of the NCCL transport, for collectives between GPUs within a host and across hosts."""
    return [
        TransportProvider(
            name="nccl",
            target="ddl_nccl.transport:NcclTransport",
            requires=("nccl.bindings", "cuda.pathfinder"),
            install=INSTALL,
            platforms=("linux",),
            probe="ddl_nccl.probe:nccl",
            library="ddl_nccl.library:library",
            suite="ddl_nccl.conformance:NcclSuite",
            suite_over="a stand-in for NCCL, on pretend devices; of NCCL and of GPUs it shows nothing",
            doc="NVIDIA's NCCL, between GPUs of one host or of several",
            priority=50,
            devices=("cuda",),
            spans_devices=True,
            own_device=one_each(os.environ),
            settings=(
                Setting(
                    "nccl_native_16bit",
                    bool,
                    False,
                    "1: NCCL adds 16-bit floats itself, and rounds after every addition; 0: they are added in float32 "
                    "and rounded once, and as many bytes are sent",
                ),
                Setting(
                    "nccl_timeout_s",
                    float,
                    0.0,
                    "how long a bucket may take on the GPU before the job fails, in seconds; 0: no limit, because a "
                    "slow rank is not a dead one",
                    minimum=0,
                ),
            ),
        )
    ]


@hookimpl
def ddl_kernels() -> list[KernelsProvider]:
    """Return the description of the part that provides memory, streams and fusion kernels of CUDA devices."""
    return [
        KernelsProvider(
            name="cuda",
            target="ddl_nccl.cuda.runtime:CudaDevice",
            requires=("numba",),
            install=INSTALL,
            platforms=("linux",),
            probe="ddl_nccl.probe:gpu",
            doc="CUDA devices, with kernels that numba compiles",
            device="cuda",
            priority=10,
        )
    ]


@hookimpl
def ddl_checks() -> list[CheckProvider]:
    """Return the descriptions of this plugin's checks for ``ddl doctor``."""
    copies = "latency and bandwidth between the GPUs of a host, with P2P on and off"
    return [
        CheckProvider("nccl", "ddl_nccl.checks:NcclCheck", doc="one NCCL on all hosts, of one CUDA"),
        CheckProvider("known-bad-nccl", "ddl_nccl.checks:KnownBadNccl", doc="wheels of NCCL that overwrite each other"),
        CheckProvider("gpu-copies", "ddl_nccl.links:LinksCheck", platforms=("linux",), doc=copies),
    ]
