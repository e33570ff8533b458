"""Mixes a program's own calls of MPI, through mpi4py, with ddl's: both work on the same ranks.

pip install . ./plugins/ddl_shm './plugins/ddl_mpi[mpich]' ./plugins/ddl_torch
ddl run -np 4 --backend mpi python examples/mpi4py_mixed.py
mpirun -np 4 python examples/mpi4py_mixed.py
"""

import ddl_torch as ddl
import numpy as np
import torch


def main() -> None:
    ddl.init()
    # Several threads call MPI: if MPI is the transport, ddl's own thread calls it, too.
    assert ddl.mpi_threads_supported()

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert ddl.size() == world.Get_size()

    for step in range(20):
        gradient = ddl.allreduce_async(torch.full((1000,), float(ddl.rank() + step)), op=ddl.Sum, name="gradient")
        # While that is under way, MPI sums something else.
        mine = np.full(1000, world.Get_rank(), dtype=np.int64)
        total = np.empty_like(mine)
        world.Allreduce(mine, total)
        summed = ddl.synchronize(gradient)

        ranks = sum(range(ddl.size()))
        if not (total == ranks).all() or not bool((summed == ranks + step * ddl.size()).all()):
            raise SystemExit(f"rank {ddl.rank()}: wrong sums in step {step}")

    if ddl.rank() == 0:
        print(f"{ddl.size()} ranks agree in ddl and in MPI")
    ddl.shutdown()


if __name__ == "__main__":
    main()
