"""The framework contract is kept by the core's own classes, and what adapters need of it can be had from the doors."""

from __future__ import annotations

from typing import get_type_hints

import numpy as np
import pytest

from ddlcore import contracts
from ddlcore.api import Operations, current_job
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.config import Settings
from ddlcore.contracts import framework
from ddlcore.job import Job
from ddlcore.runtime.device.fenced import FencedPersistentRequest
from ddlcore.runtime.request import Entry, PersistentRequest
from ddlcore.testing import run_world


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


def test_the_contract_can_be_imported_from_the_door() -> None:
    """``ddlcore.contracts`` has every name of the module."""
    assert [name for name in framework.__all__ if getattr(contracts, name) is not getattr(framework, name)] == []
