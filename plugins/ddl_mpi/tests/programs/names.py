"""The memory that MPI shares within a host has no name, so it is freed with its processes, however these end."""

from __future__ import annotations

from ddl_mpi.process import SHARED

import ddlcore as ddl

# MPICH 4 itself removes the names of these, which are of its own and of UCX; ddl-mpi does not touch them.
ALREADY = ("/dev/shm/mpich_shar_tmp", "/dev/shm/ucx_shm_posix_")


def main() -> None:
    """Check that all of it is mapped as deleted, and that MPI works with it."""
    ddl.init()
    ddl.barrier()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        shared = [line for line in maps if any(name in line for name in (*SHARED, *ALREADY))]
    named = [line for line in shared if not line.rstrip().endswith("(deleted)")]
    ddl.barrier()
    ddl.shutdown()
    print(f"mapped {len(shared)} named {len(named)}")


main()
