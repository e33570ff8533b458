"""`ddl doctor` reports NCCLs that do not fit each other, with the fix, and reports nothing else."""

from __future__ import annotations

import pytest
from ddl_nccl.checks import KnownBadNccl, NcclCheck

from ddlcore.contracts import pip_install
from ddlcore.contracts.check import Finding, HostView, Seen

A = {"nvidia-nccl-cu13": "2.32.3", "cuda-bindings": "13.5.0"}


def judged(*hosts: dict[str, str]) -> list[Finding]:
    check = NcclCheck()
    seen = [
        Seen(f"host{i}", i, 0, check.look(HostView(f"host{i}", distributions=found))) for i, found in enumerate(hosts)
    ]
    return list(check.judge(seen))


@pytest.mark.parametrize(
    "hosts",
    [
        (),
        ({},),
        ({}, A),
        (A, A),
        (A, {**A, "nvidia-nccl-cu13": "2.32.3.post1"}),
        ({"nvidia-nccl-cu12": "2.32.3"},),
        ({"nvidia-nccl-cu12": "2.32.3", **A},),  # another check reports two wheels
    ],
)
def test_nothing_is_wrong(hosts: tuple[dict[str, str], ...]) -> None:
    """Nothing is reported without NCCL, with one NCCL, or with one that was repackaged."""
    assert judged(*hosts) == []


def test_hosts_with_different_nccls() -> None:
    """The finding names the versions and their hosts, and what to install."""
    (found,) = judged(A, {**A, "nvidia-nccl-cu13": "2.29.7"}, A)
    assert found.what == "NCCL differs: 2.32.3 on host0, host2; 2.29.7 on host1"
    assert "nvidia-nccl-cu13==2.32.3.*" in found.fix and found.means
    (patched,) = judged(A, {**A, "nvidia-nccl-cu13": "2.32.10"})  # NCCL itself compares these numbers, too
    assert "nvidia-nccl-cu13==2.32.10.*" in patched.fix


def test_nccl_of_another_cuda_than_the_kernels() -> None:
    """NCCL and cuda-bindings for different versions of CUDA on one host are reported."""
    (found,) = judged({**A, "cuda-bindings": "12.9.10"})
    assert (found.where, found.what) == ("host0", "nvidia-nccl-cu13 2.32.3 beside cuda-bindings 12.9.10 on host0")
    assert pip_install("ddl-nccl[cu13]", absolute=True) in found.fix


def test_its_line() -> None:
    """The check's line for the report names the wheel and its version."""
    check = NcclCheck()
    assert (
        check.line([Seen("host0", 0, 0, check.look(HostView("host0", distributions=A)))]) == "nvidia-nccl-cu13 2.32.3"
    )
    assert check.line([Seen("host0", 0, 0, {})]) == check.line([]) == "no wheel of NCCL"


@pytest.mark.parametrize("names", [(), ("nvidia-nccl-cu12",), ("nvidia-nccl-cu12", "nvidia-nccl-cu13")])
def test_wheels_that_overwrite_each_other(names: tuple[str, ...]) -> None:
    """Two wheels are reported, whatever their versions; the fix says which to keep and which command to run."""
    check = KnownBadNccl()
    facts = check.look(HostView("host0", distributions={**dict.fromkeys(names, "2.27.3"), "numpy": "2.1.0"}))
    found = list(check.judge([Seen("host0", 0, 0, facts)]))
    assert [one.what for one in found] == (
        ["nvidia-nccl-cu12 2.27.3 beside nvidia-nccl-cu13 2.27.3 on host0"] if len(names) > 1 else []
    )
    assert all("torch.version.cuda" in one.fix and "pip uninstall" in one.fix for one in found)
