"""Starts ranks that belong to an MPI world and to ddl at once: with mpiexec, and ddl's control network beside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from ddl_mpi.library import find_library

from ddlcore.errors import PluginError
from ddlcore.launch.job.network import open_network
from ddlcore.launch.ranks.environment import (
    HostFacts,
    master_port,
    own_environments,
    shared_environment,
    thread_variables,
    usable_cores,
)
from ddlcore.launch.ranks.warmup import compile_kernels, machine_code_of
from ddlcore.plug.settings import settings_of

__all__ = ["mpi_words", "run_under_mpiexec", "what_is_missing"]


def what_is_missing() -> str:
    """Return why mpi4py's ranks cannot be started here, with the command that helps, or ""."""
    try:
        find_library()
    except PluginError as error:
        return str(error)
    return ""


def run_under_mpiexec(size: int, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run ``command`` on ``size`` ranks of one MPI world and one ddl world, and return mpiexec's exit code.

    mpiexec ends all ranks when one fails; its output is not marked by rank.
    """
    settings, registry = settings_of(environ)
    compile_kernels(machine_code_of(registry), lambda text: print(text, file=sys.stderr), settings.text("cache_dir"))
    server, _ = open_network(size, settings, registry, lambda text: print(text, file=sys.stderr))
    try:
        shared = shared_environment(environ, thread_variables(environ, usable_cores(), size))
        own = own_environments((0,) * size, (HostFacts(server.job_file),), master_port(environ))
        environments = [{**shared, **one} for one in own]
        server.start()
        return subprocess.run(
            mpi_words(find_library().mpiexec, command, environ, environments), env=dict(environ)
        ).returncode
    finally:
        server.close()


def mpi_words(
    mpiexec: str, command: Sequence[str], environ: Mapping[str, str], environments: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return mpiexec's command line: one program for each rank, with the variables that differ from ``environ``."""
    words = [mpiexec]
    for rank, environment in enumerate(environments):
        words += [":"] if rank else []
        words += ["-n", "1"]
        for name, value in environment.items():
            if environ.get(name) != value:
                words += ["-env", name, value]
        words += command
    return words
