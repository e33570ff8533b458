"""Sends tensors from one rank to another by torch's own Gloo, because ddl has only collectives.

The Gloo group is opened at the first call.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class PointToPoint:
    """Opens the Gloo group of one process group when it is first needed. The members need not open it at the same time."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._given = (store, rank, size, timeout)
        self._opened: Any = None

    def group(self) -> Any:
        """Return the Gloo group. Its ranks connect to each other when they first send or receive."""
        if self._opened is None:
            store, rank, size, timeout = self._given
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
            self._opened = dist.ProcessGroupGloo(dist.PrefixStore("point to point", store), rank, size, options)
        return self._opened

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        """Send to the rank ``to`` of the group. Return torch's work object."""
        return self.group().send(tensors, to, tag)

    def receive(self, tensors: list[torch.Tensor], giver: int, tag: int) -> Any:
        """Receive what the rank ``giver`` of the group sends with ``tag``. Return torch's work object."""
        return self.group().recv(tensors, giver, tag)

    def receive_from_any(self, tensors: list[torch.Tensor], tag: int) -> Any:
        """Receive what any rank sends with ``tag``. Return torch's work object, which then knows the rank."""
        return self.group().recv_anysource(tensors, tag)
