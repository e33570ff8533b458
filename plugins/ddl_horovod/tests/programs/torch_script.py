"""A script as Horovod's documentation has it for PyTorch. Not a line of it is ddl's."""

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    op=hvd.Average,
    backward_passes_per_step=1,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for _ in range(100):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x[:, :2].sum(dim=1, keepdim=True)).backward()
    optimizer.step()
x = torch.randn(256, 4)
loss = hvd.allreduce(torch.nn.functional.mse_loss(model(x), x[:, :2].sum(dim=1, keepdim=True)), name="loss").item()
parameters = torch.cat([one.detach().flatten() for one in model.parameters()])
assert bool((hvd.allgather(parameters.unsqueeze(0)) == parameters).all()), "the ranks have different parameters"
assert hvd.broadcast_object({"from": hvd.rank()}, root_rank=1) == {"from": 1}
if hvd.rank() == 0:
    print("learned" if loss < 0.1 else f"loss {loss}")
hvd.shutdown()
