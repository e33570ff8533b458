"""Starts ranks that are ranks of MPI and of ddl at once: by mpiexec, with ddl's control network beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddlcore.job import settings_of
from ddlcore.launch.environment import master_port, rank_environments, thread_variables
from ddlcore.launch.network import open_network
from ddlcore.launch.warmup import compile_kernels

__all__ = ["mpiexec", "run_under_mpiexec"]


def mpiexec() -> str:
    """mpiexec of this interpreter's environment."""
    return str(Path(sys.executable).with_name("mpiexec"))


def run_under_mpiexec(size: int, command: Sequence[str]) -> int:
    """The exit code of ``mpiexec``, which starts ``command`` as ``size`` ranks of one MPI world and of one ddl world."""
    settings, registry = settings_of(os.environ)
    compile_kernels(print, settings.text("cache_dir"))
    server, _ = open_network(size, settings, registry, print)
    try:
        added = thread_variables(os.environ, size, size)
        environments = rank_environments(os.environ, (0,) * size, server.job_file, added, master_port(os.environ))
        server.start()
        words = [mpiexec()]
        for rank, environment in enumerate(environments):
            words += [":"] if rank else []
            words += ["-n", "1"]
            for name, value in environment.items():
                if os.environ.get(name) != value:
                    words += ["-env", name, value]
            words += command
        return subprocess.run(words).returncode
    finally:
        server.close()
