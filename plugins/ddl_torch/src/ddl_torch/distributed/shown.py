"""What torch finds if it looks for the backend of a group that has only ddl. Needs torch 2.14."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend


class ShownBackend(Backend):
    """A backend with the name of ddl and without collectives. torch calls those of the DdlProcessGroup."""

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._timeout = timeout

    def getBackendName(self) -> str:
        return "ddl"

    @property
    def options(self) -> Any:
        return Backend.Options("ddl", self._timeout)
