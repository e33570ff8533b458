"""Horovod's names, on ddl: ``import horovod.torch as hvd`` in a script, and `horovodrun` to start it.

Each package is like that of Horovod 0.28.1. Only the framework whose package is imported is loaded.
"""

from __future__ import annotations

from ddl_horovod.original import refuse_original

from horovod.runner import run

__version__ = "0.28.1"
__all__ = ["run"]

refuse_original()
