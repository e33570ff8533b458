"""Starts the job of a program that is written for Horovod."""

from __future__ import annotations

import os
import warnings
from typing import Any

from ddl_horovod.variables import with_ddl_variables
from ddlcore.api import is_initialized, rank
from ddlcore.api.beginning import begin


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start the job, as ``ddlcore.api.init`` does, with the settings that HOROVOD_* variables ask for.

    This is true under every launcher. ddl's own variables take precedence. An average after ``join`` is divided by the
    number of all ranks, unless DDL_JOIN_AVERAGE says otherwise. Rank 0 warns of variables that have no effect, unless
    horovodrun has started it, which does so itself. Raises ValueError for a malformed value, and the errors of
    ``ddlcore.api.init``.
    """
    if is_initialized():
        return
    environ, notes = with_ddl_variables(os.environ)
    begin(comm, process_sets, environ)
    if "DDL_RANK_VARIABLES" not in environ and rank() == 0:
        for note in notes:
            warnings.warn(note, stacklevel=2)
