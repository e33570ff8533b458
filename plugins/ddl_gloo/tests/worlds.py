"""Makes groups of Gloo transports whose ranks are threads of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
from ddl_conform.group import TransportGroup, finish
from ddl_conform.oracle import Array
from ddl_gloo.transport import GlooTransport

from ddlcore.contracts.transport import Transport, Work
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.types import Buffer, DType, Member

__all__ = ["buffer", "call", "ones", "open_group", "unopened"]


def buffer(array: Array) -> Buffer:
    """Return a Buffer on a one-dimensional array."""
    return Buffer(array.ctypes.data, array.size, DType.of(array.dtype.name), array.shape, owner=array)


def unopened(size: int, hosts: Sequence[int] = (), settings: Mapping[str, str] | None = None) -> TransportGroup:
    """Return a group that is not open; its ranks are on one host, or on those in ``hosts``."""
    members = [Member(rank, host) for rank, host in enumerate(hosts or (0,) * size)]
    transports = [GlooTransport() for _ in range(size)]
    return TransportGroup(transports, CpuKernels(), members=members, settings=settings or {}, deadline_s=20.0)


@contextmanager
def open_group(
    size: int,
    hosts: Sequence[int] = (),
    settings: Mapping[str, str] | None = None,
    address: str = "",
    timeout_s: float = 80.0,
) -> Iterator[TransportGroup]:
    """Open a group with these options, and close it at the end, even after an error."""
    group = unopened(size, hosts, settings)
    try:
        group.run(
            lambda rank, transport: transport.open(replace(group.context(rank), address=address, timeout_s=timeout_s))
        )
        yield group
    finally:
        with suppress(Exception):
            group.discard()


def call(function: Callable[[int, Transport], Work]) -> Callable[[int, Transport], None]:
    """Return a function that calls ``function`` and waits for its Work."""
    return lambda rank, transport: finish(function(rank, transport))


def ones(count: int, dtype: str = "float32") -> Array:
    """Return an array of ``count`` ones."""
    return np.ones(count, dtype)
