"""The framework contract is kept by the core's own classes, and what adapters need of it can be had from the doors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np
import pytest

from ddlcore import contracts
from ddlcore.api import Handle, Operations, current_job
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.config.loading import Settings
from ddlcore.contracts import framework
from ddlcore.process.job import Job
from ddlcore.runtime.fenced import FencedPersistentRequest
from ddlcore.runtime.request import Entry, PersistentRequest
from ddlcore.testing import run_world
from ddlcore.types import Sum


def as_declared(
    job: Job,
    settings: Settings,
    request: PersistentRequest,
    fenced: FencedPersistentRequest,
    entry: Entry,
) -> tuple[
    framework.JobService,
    framework.JobSettings,
    framework.PersistentRequest,
    framework.PersistentRequest,
    framework.TensorEntry,
]:
    """Return the arguments: mypy checks that each class satisfies its protocol."""
    return job, settings, request, fenced, entry


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [
        (framework.JobSettings, Settings),
        (framework.PersistentRequest, PersistentRequest),
        (framework.PersistentRequest, FencedPersistentRequest),
        (framework.TensorEntry, Entry),
    ],
)
def test_the_classes_have_what_is_declared(protocol: type, kind: type) -> None:
    """Every method and attribute of the protocol, under its name."""
    names = {name for name in (*vars(protocol), *get_type_hints(protocol)) if not name.startswith("_")}
    assert names
    assert [name for name in sorted(names) if not hasattr(kind, name)] == []


def test_a_job_has_what_is_declared() -> None:
    """Once it is started: some of its attributes are made then."""
    names = {name for name in vars(framework.JobService) if not name.startswith("_")}

    def play(rank: int, job: Job) -> None:
        operations = Operations(NumpyAdapter())
        request = operations.persistent_allreduce(np.ones(3), name="x")
        as_declared(job, job.settings, request, request, request)  # type: ignore[arg-type]  # one is on a device
        assert [name for name in sorted(names) if not hasattr(current_job(), name)] == []

    run_world(2, play)


class Staging(Operations):
    """Submits copies of arrays whose memory is not known before, in place of the arrays."""

    def __init__(self) -> None:
        super().__init__(NumpyAdapter())
        self.copies: list[Any] = []

    def hand_over(
        self, job: framework.JobService, handle: Handle, entries: Sequence[framework.TensorEntry], waits: bool
    ) -> None:
        job.name_entries(entries)
        for entry in entries:
            source, target = entry.source, entry.target
            assert source is not None
            assert target is source
            near = replace(source, address=0, owner=np.array(source.owner))
            self.copies.append(near.owner)
            entry.move(near, near)
            entry.locate(lambda owner: int(owner.ctypes.data))
        job.submit(entries, waits)


def test_other_memory_is_submitted() -> None:
    """``move`` replaces what a verb has described, and ``locate`` finds it; the order of unnamed calls is kept."""

    def play(rank: int, job: Job) -> None:
        operations = Staging()
        arrays = [np.full(4, 10.0 * i + rank) for i in range(3)]
        for handle in [operations.allreduce_async(array, output=array, op=Sum) for array in arrays]:
            handle.wait()
        assert [array[0] for array in arrays] == [10.0 * i + rank for i in range(3)]
        assert [copy.tolist() for copy in operations.copies] == [[20.0 * i + 1] * 4 for i in range(3)]

    run_world(2, play)


def test_the_contract_can_be_imported_from_the_door() -> None:
    """``ddlcore.contracts`` has every name of the module."""
    assert [name for name in framework.__all__ if getattr(contracts, name) is not getattr(framework, name)] == []
