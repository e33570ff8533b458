"""Averages of integers at the limits of their types; MPI adds the types that it supports."""

from __future__ import annotations

import ddlcore as ddl
from tests.runtime.integers import check_averages

ddl.init()
check_averages(ddl.rank(), ddl.size(), 5)
replayed = ddl.stats()["buckets_replayed"] > 0
ddl.shutdown()
print("exact" if replayed else "never replayed")
