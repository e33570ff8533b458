"""What to install for a name that no installed plugin offers: the one place where the core names plugins."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ALIASES"]

ALIASES: Mapping[str, Mapping[str, str]] = {  # door -> name -> the line that installs it
    "transport": {
        "gloo": "pip install ddl-gloo",
        "mpi": "pip install ddl-mpi",
        "nccl": "pip install ddl-nccl",
    },
    "adapter": {
        "torch": "pip install ddl-torch",
        "tensorflow": "pip install ddl-tf",
        "keras": "pip install ddl-tf",
        "mxnet": "pip install ddl-mxnet",
    },
    "launcher": {
        "mpi": "pip install ddl-mpi",
    },
    "library of communicators": {
        "mpi4py": "pip install ddl-mpi",
    },
    "bench peer": {
        "gloo": "pip install ddl-torch",
        "mpi": "pip install ddl-mpi",
    },
}
