"""Starts and ends timelines as Horovod does, which lets a script start one while another one is recorded."""

from __future__ import annotations

import os
import weakref

from ddlcore import api
from ddlcore.contracts.framework import JobService

_files: weakref.WeakKeyDictionary[JobService, str] = weakref.WeakKeyDictionary()  # of the timelines that are recorded


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record a timeline from now on; see ``ddlcore.api.start_timeline``. Every rank must call this with the same file.

    A timeline with another file ends first. If the timeline with this file is being recorded, nothing changes.
    """
    job, file = api.current_job(), os.path.abspath(file_path)
    if _files.get(job) != file:
        stop_timeline()
        api.start_timeline(file, mark_cycles)
        _files[job] = file


def stop_timeline() -> None:
    """End the timeline that is being recorded, if there is one; see ``ddlcore.api.stop_timeline``."""
    _files.pop(api.current_job(), None)
    api.stop_timeline()
