"""Declare to the core what ddl_mpi adds, as plain data. This module imports mpi4py neither directly nor indirectly."""

from __future__ import annotations

from ddlcore.hooks import (
    BenchPeerProvider,
    CheckProvider,
    CommunicatorsProvider,
    LauncherProvider,
    ReleaseRange,
    Setting,
    TransportProvider,
    hookimpl,
)

INSTALL = "pip install 'ddl-mpi[mpich]'"


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Return the description of the transport over the MPI library that mpi4py loads."""
    return [
        TransportProvider(
            name="mpi",
            target="ddl_mpi.transport:MpiTransport",
            requires=("mpi4py",),
            install=INSTALL,
            tested=(ReleaseRange("mpi4py", "4.1", "4.1"),),
            doc="the MPI that mpi4py loads, on one host or across hosts",
            priority=30,
            sizes=(2, None),
            launcher="mpi",
            attended=True,
            suite="ddl_mpi.conformance:MpiSuite",
            settings=(
                Setting(
                    "mpi_persistent",
                    bool,
                    True,
                    "1: use MPI's persistent requests for large allreduces that are repeated in the same memory; 0: never",
                ),
            ),
        )
    ]


@hookimpl
def ddl_communicators() -> list[CommunicatorsProvider]:
    """Return the description of the support for mpi4py's communicators, which users may pass to ``init``."""
    return [
        CommunicatorsProvider(
            name="mpi",
            target="ddl_mpi.comms:MpiCommunicators",
            requires=("mpi4py",),
            install=INSTALL,
            doc="mpi4py's communicators, for init(comm=…)",
            module="mpi4py",
        )
    ]


@hookimpl
def ddl_launchers() -> list[LauncherProvider]:
    """Return the description of the launcher that starts ranks with mpiexec or srun."""
    return [
        LauncherProvider(
            name="mpi",
            target="ddl_mpi.launcher:MpiLauncher",
            requires=("mpi4py",),
            install=INSTALL,
            doc="mpiexec of the MPI that mpi4py loads, or srun",
            optional=True,
            whole=True,
            per_rank=True,
            clusters=("openmpi", "pmix", "hydra", "mvapich", "pals", "jsrun"),
        )
    ]


@hookimpl
def ddl_bench_peers() -> list[BenchPeerProvider]:
    """Return the description of the peer that calls mpi4py's own collectives, for `ddl bench`."""
    return [
        BenchPeerProvider(
            name="mpi",
            target="ddl_mpi.peer:MpiPeer",
            requires=("mpi4py",),
            install=INSTALL,
            doc="mpi4py's blocking collectives",
            launcher="mpi",
        )
    ]


@hookimpl
def ddl_checks() -> list[CheckProvider]:
    """Return the descriptions of checks for `ddl doctor`."""
    return [CheckProvider("known-bad-mpi", "ddl_mpi.checks:KnownBadMpi", doc="a release of MPI that hangs")]
