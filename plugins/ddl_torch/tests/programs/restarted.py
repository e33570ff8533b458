"""Makes the default group twice. torchrun starts the ranks again after one has died: nothing older is believed."""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for time in range(2):
        dist.init_process_group("ddl")
        rank = dist.get_rank()
        tensor = torch.full((2,), float(rank + time))
        pair = dist.new_group([0, 1])
        for group in (None, pair):
            dist.all_reduce(tensor, group=group)
            dist.distributed_c10d._get_default_group().monitored_barrier(timedelta(seconds=60))
        assert tensor.tolist() == [2.0 + 4 * time] * 2, tensor
        if rank == 0:
            dist.send(tensor, 1)
        else:
            if attempt == 0 and time == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.recv(tensor, 0)
        dist.barrier()
        dist.destroy_process_group()
    print(f"rank {rank}: attempt {attempt} has ended", flush=True)


if __name__ == "__main__":
    main()
