"""Fixtures of every room: ``bed`` and ``new_bed``. They skip, with the reason, where this machine cannot have one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tools.bed import Bed, why_no_bed

__all__ = ["bed", "new_bed"]


@pytest.fixture
def new_bed() -> Iterator[Callable[..., Bed]]:
    """``new_bed(hosts, rate_mbit=…, …)``: a bed that is up, as ``tools.bed.Bed`` makes it, until the test ends."""
    why = why_no_bed()
    if why:
        pytest.skip(why)
    with contextlib.ExitStack() as stack:

        def up(*arguments: Any, **settings: Any) -> Bed:
            return stack.enter_context(Bed(*arguments, **settings))

        yield up


@pytest.fixture
def bed(new_bed: Callable[..., Bed]) -> Bed:
    """Two hosts, server1 and server2, without a limit of rate."""
    return new_bed()
