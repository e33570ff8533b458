"""One allreduce with ddl; tools/bench_startup.py times the whole script."""

import ddl_torch as ddl
import torch

ddl.init()
total = ddl.allreduce(torch.ones(4), name="ones", op=ddl.Sum)
assert total.tolist() == [ddl.size()] * 4
ddl.shutdown()
