"""List the plugins and frameworks that the core knows, and the commands that install them. No other module names them."""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, Mapping[str, str]] = {  # kind -> name -> the command that installs it
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
    "kernels": {  # by kind of device
        "cuda": "pip install ddl-nccl",
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

FLAGS_OF_TRANSPORTS: Mapping[str, str] = {  # horovodrun's flag -> the transport that it asks for
    "--gloo": "gloo",
    "--mpi": "mpi",
}

FRAMEWORKS: Mapping[str, tuple[str, ...]] = {  # module that `ddl info` looks for -> the distributions it may come from
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu"),
    "keras": ("keras",),
    "mxnet": ("mxnet",),
    "numpy": ("numpy",),
    "numba": ("numba",),
}
