"""A rank without a framework: says where it is, by Horovod's variables and functions, and what an average after join is."""

import json
import os
import sys

# What a script reads before it imports anything.
told = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}

import numpy as np  # noqa: E402
from horovod.common.basics import HorovodBasics  # noqa: E402

from ddlcore.api import arrays, current_job, join  # noqa: E402

hvd = HorovodBasics(__file__, "library")
hvd.init()
average = -1.0
if hvd.rank() == 0:
    average = float(arrays.allreduce(np.full(1, 8.0), "gradient")[0])
last = join()
settings = {name: current_job().settings[name] for name in ("fusion_bytes", "stall_warning_s", "join_average")}
found = {
    "told": told,
    "rank": hvd.rank(),
    "size": hvd.size(),
    "average": average,
    "settings": settings,
    "last": last,
}
sys.stdout.write(f"{json.dumps(found)}\n")  # in one piece, because both ranks may have the same pipe
sys.stdout.flush()
hvd.shutdown()
