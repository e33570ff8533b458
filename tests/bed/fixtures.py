"""Fixtures of every room: ``bed``, ``new_bed`` and ``slurm``. They skip, with the reason, where this machine cannot have one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tools.bed import Bed, Slurm, why_no_bed, why_no_slurm

__all__ = ["bed", "new_bed", "slurm"]


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


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A cluster of two nodes, server1 and server2, for all tests of a module: it takes a few seconds to come up."""
    why = why_no_slurm()
    if why:
        pytest.skip(why)
    with Slurm(2) as cluster:
        yield cluster
