"""DistributedDataParallel on ranks that may be lost, and on others that join: `ddl run -np 3 --min-np 2 …`."""

import ddl_torch as ddl
import torch
from ddl_torch import elastic
from learning import digits, network, options, tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


@elastic.run
def train(state: elastic.TorchState, learn: Dataset[tuple[torch.Tensor, ...]], epochs: int, batch: int) -> None:
    """Go on from ``state``, which is the same on all ranks. A rank that is lost ends this call, and it is called again."""
    with elastic.process_group():  # of the ranks that there are now
        model = DistributedDataParallel(state.model)
        sampler = state.sampler
        loader = DataLoader(learn, batch, sampler=sampler)
        while sampler.epoch < epochs:
            for number, (images, labels) in enumerate(loader):
                state.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                state.optimizer.step()
                sampler.record_batch(number, batch)
                state.commit()  # here other ranks may join
            sampler.set_epoch(sampler.epoch + 1)
            if ddl.rank() == 0:
                print(
                    f"epoch {sampler.epoch}: loss {loss.item():.4f}, {ddl.size()} ranks, step {state.steps}", flush=True
                )
        tell(model)


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(batch=16)  # of each rank, however many there are
    args = parser.parse_args()
    ddl.init()
    torch.manual_seed(1)
    learn, _, _ = digits()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    state = elastic.TorchState(model, optimizer, sampler=elastic.ElasticSampler(learn))
    train(state, learn, args.epochs, args.batch)


if __name__ == "__main__":
    main()
