"""The class by whose methods each of Horovod's packages starts the job, and asks for its rank."""

from __future__ import annotations

from typing import Any

from ddl_horovod import beginning, timelines
from ddl_horovod.process_sets import ProcessSet

from ddlcore import api
from ddlcore.api import BuildQuestions, global_process_set
from ddlcore.types import Adasum, Average, Max, Min, Product, Sum
from horovod.common import util

__all__ = ["HorovodBasics", "ProcessSet", "global_process_set", "util"]

_ask = BuildQuestions(__name__)


class HorovodBasics:
    """The job of this process. ``pkg_path`` and ``args``, the place of a compiled library in Horovod, are not used."""

    Average, Sum, Adasum, Min, Max, Product = Average, Sum, Adasum, Min, Max, Product

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        pass

    def init(self, comm: Any = None, process_sets: Any = None) -> None:
        """Start the job; see ``ddl_horovod.beginning.init``."""
        beginning.init(comm, process_sets)

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Record a timeline from now on; see ``ddl_horovod.timelines.start_timeline``."""
        timelines.start_timeline(file_path, mark_cycles)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return {number: list(ranks) for number, ranks in api.process_sets().items()}

    shutdown = staticmethod(api.shutdown)
    is_initialized = staticmethod(api.is_initialized)
    is_homogeneous = staticmethod(api.is_homogeneous)
    stop_timeline = staticmethod(timelines.stop_timeline)
    size = staticmethod(api.size)
    rank = staticmethod(api.rank)
    local_size = staticmethod(api.local_size)
    local_rank = staticmethod(api.local_rank)
    cross_size = staticmethod(api.cross_size)
    cross_rank = staticmethod(api.cross_rank)
    mpi_built = staticmethod(_ask.built("mpi_built", "mpi", "MPI"))
    mpi_enabled = staticmethod(_ask.enabled("mpi_enabled", "mpi", "MPI"))
    mpi_threads_supported = staticmethod(_ask.threads_supported("mpi_threads_supported", "mpi", "MPI"))
    gloo_built = staticmethod(_ask.built("gloo_built", "gloo", "Gloo"))
    gloo_enabled = staticmethod(_ask.enabled("gloo_enabled", "gloo", "Gloo"))
    nccl_built = staticmethod(_ask.built_version("nccl_built", "nccl", "NCCL", 23203))
    ccl_built = staticmethod(_ask.built("ccl_built", "ccl", "oneCCL"))
    ddl_built = staticmethod(_ask.built("ddl_built", "ibm-ddl", "IBM's DDL"))

    @staticmethod
    def cuda_built() -> bool:
        """Return whether reductions on CUDA devices are possible: whether the transport for them can be used."""
        return api.built("nccl")

    @staticmethod
    def rocm_built() -> bool:
        """Return False: there is no transport for ROCm."""
        return False
