"""Rank 1 is killed while an array of rank 0 depends on it; rank 0 waits for the array by MXNet's own means."""

from __future__ import annotations

import os
import signal
import time

import ddl_mxnet as ddl
import mxnet as mx

ddl.init()
ddl.allreduce(mx.nd.ones((3,)), name="both").wait_to_read()
if ddl.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
waited = ddl.allreduce_(mx.nd.ones((3,)), name="gone") + 1
begun_s = time.monotonic()
try:
    waited.asnumpy()
except ddl.PeerLost as error:
    print(f"lost {error.ranks} within {time.monotonic() - begun_s < 20.0}: {error}")
