"""List the plugins and frameworks that the core knows, and the distributions (packages) that contain them.

No other module of the core contains their names, but for text/installing.py, which knows what needs ddl-shm.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, Mapping[str, str]] = {  # kind -> name -> the distribution that has it
    "transport": {
        "gloo": "ddl-gloo",
        "hierarchical": "ddl-shm",
        "mpi": "ddl-mpi",
        "nccl": "ddl-nccl",
        "shm": "ddl-shm",
    },
    "adapter": {"torch": "ddl-torch", "tensorflow": "ddl-tf", "keras": "ddl-tf", "mxnet": "ddl-mxnet"},
    "kernels": {  # by kind of device
        "cuda": "ddl-nccl",
    },
    "launcher": {"mpi": "ddl-mpi"},
    "library of communicators": {"mpi4py": "ddl-mpi"},
    "command": {
        "bench": "ddl-doctor",
        "conform": "ddl-conform",
        "doctor": "ddl-doctor",
        "plugins new": "ddl-conform",
        "timeline": "ddl-doctor",
    },
    "setting": {
        "activity": "ddl-doctor",
        "dashboard": "ddl-dashboard",
        "hierarchical_chunk_bytes": "ddl-shm",
        "hierarchical_shares": "ddl-shm",
        "metrics_address": "ddl-prometheus",
        "metrics_port": "ddl-prometheus",
        "pulse_s": "ddl-doctor",
        "sample_ms": "ddl-doctor",
        "shm_chunk_bytes": "ddl-shm",
        "timeline": "ddl-doctor",
        "timeline_mark_cycles": "ddl-doctor",
        "top": "ddl-dashboard",
    },
    "watch": {"dashboard": "ddl-dashboard", "timeline": "ddl-doctor", "top": "ddl-dashboard"},
    "observer": {
        "metrics": "ddl-prometheus",
        "pulses": "ddl-doctor",
        "samples": "ddl-doctor",
        "timeline": "ddl-doctor",
    },
    "recorder": {"timeline": "ddl-doctor"},
    "bench peer": {"gloo": "ddl-torch", "mpi": "ddl-mpi"},
}

VARIABLES_OF_OTHERS: Mapping[str, tuple[str, str]] = {  # prefix of variables -> the command that reads them, its plugin
    "HOROVOD_": ("horovodrun", "ddl-horovod"),
}

FRAMEWORKS: Mapping[str, tuple[str, ...]] = {  # module that `ddl info` looks for -> the distributions it may come from
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu"),
    "keras": ("keras",),
    "mxnet": ("mxnet",),
    "numpy": ("numpy",),
    "numba": ("numba",),
}
