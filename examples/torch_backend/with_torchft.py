"""Learns handwritten digits with torchft on ddl: replicas that are lost or join while the others go on.

Start a lighthouse and then each replica, on any host: `torchft_lighthouse --min_replicas 1` and
`TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torch_backend/with_torchft.py --replica 0`
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from learning import digits, network, options, tell
from torch import nn
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(batch=16)  # of each replica, however many there are
    parser.add_argument("--replica", type=int, required=True, help="number of this replica")
    parser.add_argument("--replicas", type=int, default=3, help="how many replicas divide the images among themselves")
    parser.add_argument("--steps", type=int, default=300, help="steps that count, of all replicas together")
    args = parser.parse_args()
    torch.manual_seed(1)
    learn, _, _ = digits()

    # The group has no peers until the manager reconfigures it, again and again, with the replicas that there are.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group(args.backend, store=store, rank=0, world_size=1, enable_reconfigure=True)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=dist.group.WORLD,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"digits_{args.replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    model = DistributedDataParallel(manager, network())
    optimizer = Optimizer(manager, torch.optim.Adam(model.parameters(), lr=args.lr))
    sampler = DistributedSampler(learn, args.replica, args.replicas, shuffle=True)
    loader = DataLoader(learn, args.batch, sampler=sampler, drop_last=True)
    while manager.current_step() < args.steps:
        for images, labels in loader:
            optimizer.zero_grad()  # here replicas may come and go
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()  # only if all replicas have their gradients
            print(
                f"step {manager.current_step()}: loss {loss.item():.4f}, {manager.num_participants()} replicas",
                flush=True,
            )
            if manager.current_step() >= args.steps:
                break
    tell(model)
    manager.shutdown(wait=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
