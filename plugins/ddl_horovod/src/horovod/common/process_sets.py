"""Process sets: groups of ranks that run collectives among themselves."""

from __future__ import annotations

from ddl_horovod.process_sets import ProcessSet, add_process_set

from ddlcore.api import global_process_set, remove_process_set
from horovod.common.util import is_iterable

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "is_iterable", "remove_process_set"]
