"""Declares ddl_mpi to the core as plain data; imports neither mpi4py nor anything that imports it."""

from __future__ import annotations

from ddlcore.hooks import (
    BenchPeerProvider,
    CheckProvider,
    CommunicatorsProvider,
    LauncherProvider,
    Setting,
    TransportProvider,
    hookimpl,
)

INSTALL = "pip install 'ddl-mpi[mpich]'"


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Return the provider of the transport over the MPI that mpi4py loads."""
    return [
        TransportProvider(
            name="mpi",
            target="ddl_mpi.transport:MpiTransport",
            requires=("mpi4py",),
            install=INSTALL,
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
    """Return the provider of mpi4py's communicators, which may be passed to ``init``."""
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
    """Return the provider of the launcher that uses mpiexec, or srun in its place."""
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
    """Return the provider of the peer that calls mpi4py's own collectives."""
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
    """Return the providers of checks for `ddl doctor`."""
    return [CheckProvider("known-bad-mpi", "ddl_mpi.checks:KnownBadMpi", doc="a release of MPI that hangs")]
