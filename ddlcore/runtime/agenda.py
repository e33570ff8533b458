"""The items that the engine's thread must run before it runs buckets of the schedule."""

from __future__ import annotations

from collections import deque

from ddlcore.runtime.request import Todo


class Agenda:
    """The engine's queue, and whether the engine must end. The lock of the tensor queue protects both."""

    __slots__ = ("stopped", "todo")

    def __init__(self) -> None:
        self.todo: deque[Todo] = deque()
        self.stopped = False
