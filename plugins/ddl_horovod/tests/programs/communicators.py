"""Ranks that MPI starts: process sets of a communicator that is split into even and odd ranks."""

import horovod.torch as hvd
import torch
from mpi4py import MPI

half = MPI.COMM_WORLD.Split(color=MPI.COMM_WORLD.rank % 2, key=MPI.COMM_WORLD.rank)
mine = hvd.ProcessSet(half)
assert mine.ranks is None and mine.process_set_id is None
hvd.init(comm=MPI.COMM_WORLD, process_sets=[mine])
assert hvd.global_process_set.mpi_comm == MPI.COMM_WORLD
assert mine.ranks == [hvd.rank() % 2, hvd.rank() % 2 + 2] and mine.rank() == half.rank and mine.included()
total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, process_set=mine)
print("sums", int(total.item()), flush=True)
MPI.COMM_WORLD.barrier()
