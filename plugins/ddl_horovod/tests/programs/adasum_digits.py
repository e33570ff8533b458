"""Learns handwritten digits with op=Adasum. Each rank sees its own part of the images."""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits

hvd.init()
torch.manual_seed(0)
pixels, classes = load_digits(return_X_y=True)
shuffled = torch.randperm(len(classes))
images, labels = torch.tensor(pixels, dtype=torch.float32)[shuffled] / 16, torch.tensor(classes)[shuffled]
mine = torch.arange(hvd.rank(), 1500, hvd.size())
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.1, momentum=0.9
)  # the rate of one process, whatever the number of ranks
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(20):
    for rows in mine[torch.randperm(len(mine))].split(32):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
right = (model(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean().item()
parameters = torch.cat([one.detach().flatten() for one in model.parameters()])
assert bool((hvd.allgather(parameters.unsqueeze(0)) == parameters).all()), "the ranks have different parameters"
if hvd.rank() == 0:
    print("learned" if right > 0.95 else f"accuracy {right}")
