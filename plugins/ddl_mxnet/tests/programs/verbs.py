"""Runs every collective on real processes, under each engine of MXNet, and ends without waiting for the last one."""

from __future__ import annotations

from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np

ddl.init()
rank, size = ddl.rank(), ddl.size()
mine = np.arange(6.0, dtype=np.float32).reshape(6, 1) * (rank + 1)
total = np.arange(6.0, dtype=np.float32).reshape(6, 1) * sum(range(1, size + 1))


def same(array: Any, expected: Any) -> None:
    """Raise AssertionError if the arrays differ."""
    np.testing.assert_allclose(array.asnumpy(), expected, rtol=1e-6)


for step in range(12):  # long enough to be replayed
    tensor = mx.nd.array(mine)
    same(ddl.allreduce(tensor, op=ddl.Sum, name="new"), total)
    same(ddl.synchronize(ddl.allreduce_async(tensor, op=ddl.Sum)), total)
    same(ddl.broadcast(tensor, size - 1), total * 0 + np.arange(6.0).reshape(6, 1) * size)
    same(ddl.allgather(tensor[: rank + 1]), np.concatenate([mine[: r + 1] / (rank + 1) * (r + 1) for r in range(size)]))
    rows, received = ddl.alltoall(tensor, splits=[6 - size + 1] + [1] * (size - 1))
    assert received.asnumpy().tolist() == [6 - size + 1 if rank == 0 else 1] * size
    same(ddl.reducescatter(tensor, op=ddl.Sum), total[6 // size * rank : 6 // size * (rank + 1)])
    for one in ddl.grouped_allreduce_([mx.nd.array(mine), mx.nd.array(mine)], op=ddl.Sum, name="group", priority=step):
        same(one, total)
    x = mx.nd.array(mine)
    x.attach_grad()
    with mx.autograd.record():
        loss = (ddl.allreduce(x, op=ddl.Sum, name="x") * (rank + 1)).sum()
    loss.backward()
    same(x.grad, np.full((6, 1), sum(range(1, size + 1))))
handles = [ddl.allreduce_async(mx.nd.array(mine), op=ddl.Sum, name=f"turned.{i}") for i in range(8)]
for handle in reversed(handles) if rank else handles:
    same(handle.wait(), total)
reported = ""
try:
    ddl.allreduce(mx.nd.ones((1 + rank,)), name="wrong").wait_to_read()
except ddl.DdlInternalError as error:
    reported = str(error)
assert "wrong" in reported, "a mismatch was not reported"
assert ddl.broadcast_object({"from": rank}, 1) == {"from": 1}
assert ddl.allgather_object(rank) == list(range(size))
ddl.barrier()
if rank == 0:
    ddl.allreduce(mx.nd.ones((3,)), name="alone", op=ddl.Sum)  # submitted before this rank joins
    assert ddl.join() in range(size)
else:
    same(ddl.allreduce(mx.nd.ones((3,)), name="alone", op=ddl.Sum), np.full(3, size))
    assert ddl.join() in range(size)
last = mx.nd.random.normal(shape=(900, 900))
for _ in range(5):
    last = mx.nd.dot(last, last) * 1e-3
    ddl.allreduce_(last, name="last")  # the script does not wait for it, but its exit does
print("done")
