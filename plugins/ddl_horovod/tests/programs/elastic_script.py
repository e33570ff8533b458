"""A script as Horovod's documentation has it for elastic PyTorch. Not a line of it is ddl's. Rank 1 kills itself once."""

import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

hvd.init()
mark = Path(sys.argv[1])
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    while state.batch < 60:
        x = torch.rand(16, 1)
        state.optimizer.zero_grad()
        torch.nn.functional.mse_loss(state.model(x), 3 * x).backward()
        state.optimizer.step()
        state.batch += 1
        state.commit()
        if state.batch == 10 and hvd.rank() == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


state = hvd.elastic.TorchState(model, optimizer, batch=0)
sizes = [hvd.size()]
state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
train(state)
if hvd.rank() == 0:
    slope = model.weight.item()
    print("learned" if abs(slope - 3) < 0.3 else f"slope {slope}", state.batch, mark.exists())
