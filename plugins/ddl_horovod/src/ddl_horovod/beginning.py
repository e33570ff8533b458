"""Starts the job of a program that is written for Horovod."""

from __future__ import annotations

import os
import warnings
from typing import Any

from ddl_horovod.process_sets import register
from ddl_horovod.variables import with_ddl_variables
from ddlcore.api import is_initialized, rank
from ddlcore.api.beginning import begin
from ddlcore.errors import InvalidArgument

# For programs that speak through these packages, and for no others, whoever has started them.
_DEFAULTS = {"DDL_JOIN_AVERAGE": "size"}


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start the job, as ``ddlcore.api.init`` does, with the settings that HOROVOD_* variables ask for.

    This is true under every launcher. ddl's own variables take precedence. An average after ``join`` is divided by the
    number of all ranks, unless DDL_JOIN_AVERAGE says otherwise. Rank 0 warns of variables that have no effect, unless
    horovodrun has started it, which does so itself.

    ``process_sets``: sets to register, also in a job that runs already; see ``process_sets.register``. Raises ValueError for
    a malformed value, and the errors of ``ddlcore.api.init``.
    """
    if not is_initialized():
        environ, notes = with_ddl_variables(os.environ)
        begin(comm, None, {**_DEFAULTS, **environ})
        if "HOROVOD_RANK=" not in environ.get("DDL_RANK_VARIABLES", "") and rank() == 0:
            for note in notes:
                warnings.warn(note, stacklevel=2)
    if process_sets and not isinstance(process_sets, str):
        register(list(process_sets), comm)
    elif isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise InvalidArgument(f"process_sets={process_sets!r} is neither a list of ProcessSet nor 'dynamic'")
