"""Elastic training: what the packages of all frameworks have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddlcore.api import elastic
from ddlcore.api.elastic import run
from ddlcore.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]


class State(elastic.State):
    """The base class of one's own elastic states, which define ``save``, ``restore`` and ``sync``.

    ``bcast_object`` is kept for ``sync``: a function that returns the root's object on every rank. ``get_rank`` is kept,
    too.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        super().__init__()
        self._bcast_object = bcast_object
        self._rank = get_rank


class ObjectState(elastic.ObjectState):
    """An elastic state of plain Python values, which are attributes. ``bcast_object`` and ``get_rank`` are not used."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank, **kwargs)


def run_fn(func: Callable[..., Any], reset: Callable[[], object]) -> Callable[..., Any]:
    """Return ``func`` as an elastic training function; see ``ddlcore.api.elastic.run``.

    ``reset``, which in Horovod leaves the world and enters the next one, is not called: the result does that itself.
    """
    return run(func)
