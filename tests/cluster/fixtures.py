"""Fixtures of every room: ``cluster``, ``new_cluster`` and ``slurm``. They skip, with the reason, where this machine cannot have one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tools.test_cluster import Slurm, TestCluster, why_no_cluster, why_no_slurm

__all__ = ["cluster", "new_cluster", "slurm"]


@pytest.fixture
def new_cluster() -> Iterator[Callable[..., TestCluster]]:
    """``new_cluster(hosts, rate_mbit=…, …)``:

    a test cluster that is up, as ``tools.test_cluster.TestCluster`` makes it, until the test ends.
    """
    why = why_no_cluster()
    if why:
        pytest.skip(why)
    with contextlib.ExitStack() as stack:

        def up(*arguments: Any, **settings: Any) -> TestCluster:
            return stack.enter_context(TestCluster(*arguments, **settings))

        yield up


@pytest.fixture
def cluster(new_cluster: Callable[..., TestCluster]) -> TestCluster:
    """Two hosts, server1 and server2, without a limit of rate."""
    return new_cluster()


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A cluster of two nodes, server1 and server2, for all tests of a module: it takes a few seconds to come up."""
    why = why_no_slurm()
    if why:
        pytest.skip(why)
    with Slurm(2) as cluster:
        yield cluster
