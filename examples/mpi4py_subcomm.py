"""Splits the ranks with an mpi4py communicator; each part of the ranks is a world of its own for ddl.

pip install . ./plugins/ddl_shm './plugins/ddl_mpi[mpich]' ./plugins/ddl_torch
ddl run -np 4 --backend mpi python examples/mpi4py_subcomm.py
mpirun -np 4 python examples/mpi4py_subcomm.py
"""

import ddl_torch as ddl
import torch
from mpi4py import MPI


def main() -> None:
    world = MPI.COMM_WORLD
    subcomm = world.Split(color=world.rank % 2, key=world.rank)

    ddl.init(comm=subcomm)
    if (ddl.rank(), ddl.size()) != (subcomm.rank, subcomm.size):
        raise SystemExit(f"rank {world.rank} of MPI is {ddl.rank()} of {ddl.size()}, not {subcomm.rank}")
    total = ddl.allreduce(torch.tensor([float(world.rank)]), op=ddl.Sum)
    members = ddl.allgather(torch.tensor([world.rank]))

    print(
        f"COMM_WORLD rank: {world.rank}, ddl rank: {ddl.rank()} of {ddl.size()}, "
        f"with ranks {members.tolist()}, whose sum is {total.item():g}",
        flush=True,
    )
    ddl.shutdown()


if __name__ == "__main__":
    main()
