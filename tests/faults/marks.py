"""The marks by which a test of chaos finds the ranks that have the state of the training."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def has_state() -> None:
    """Record that this process has the state, in the folder FOLDER, and in STATES if each host has its own process numbers."""
    (Path(os.environ["FOLDER"]) / str(os.getpid())).touch()
    if "STATES" in os.environ:
        (Path(os.environ["STATES"]) / f"state.{socket.gethostname()}.{os.getpid()}").touch()
