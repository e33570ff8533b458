"""Declare to the core what ddl_shm adds, as plain data."""

from __future__ import annotations

from ddlcore.hooks import Setting, TransportProvider, hookimpl
from ddlcore.types import Knob

SHM_SETTINGS = (
    Setting(
        "shm_chunk_bytes",
        int,
        0,
        "in shared memory: how much a rank publishes at a time, in bytes, a power of two from 32768 to 1048576; "
        "0: by the numbers of ranks and cores",
        minimum=0,
        group="performance",
    ),
)
SHM_KNOBS = (
    Knob(
        "shm_chunk_bytes",
        choices=(0, 32 << 10, 64 << 10, 128 << 10, 256 << 10),
        reopens=True,
        doc="what is published at a time",
    ),
)
HIERARCHICAL_SETTINGS = (
    Setting(
        "hierarchical_chunk_bytes",
        int,
        1 << 20,
        "across hosts: how much is reduced within a host, crosses, and is spread at a time, in bytes",
        minimum=4096,
        group="performance",
    ),
    Setting(
        "hierarchical_shares",
        int,
        2,
        "across hosts: how many ranks of each host send and receive, each a share; 0: as many as every host has",
        minimum=0,
        group="performance",
    ),
)
HIERARCHICAL_KNOBS = (
    Knob("hierarchical_chunk_bytes", 64 << 10, 16 << 20, logarithmic=True, reopens=True, doc="what crosses at a time"),
    Knob("hierarchical_shares", choices=(1, 2, 4), reopens=True, doc="ranks of a host that cross"),
)


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Return the descriptions of two transports.

    One connects the processes of a host. The other combines it, or another one within hosts, with a transport across
    hosts.
    """
    return [
        TransportProvider(
            name="shm",
            target="ddl_shm.transport:ShmTransport",
            doc="shared memory among the processes of one host",
            platforms=("linux",),
            priority=50,
            one_host=True,
            sizes=(2, None),
            settings=SHM_SETTINGS,
            knobs=SHM_KNOBS,
            machine_code="ddl_shm.machine_code:SHM",
        ),
        TransportProvider(
            name="hierarchical",
            target="ddl_shm.hierarchical.transport:HierarchicalTransport",
            doc="one transport within the hosts, another across them: LOCAL+CROSS",
            composes=True,
            sizes=(2, None),
            settings=HIERARCHICAL_SETTINGS,
            knobs=HIERARCHICAL_KNOBS,
            suite="ddl_conform.builtin:HierarchicalSuite",
        ),
    ]
