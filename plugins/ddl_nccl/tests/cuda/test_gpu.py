"""Runs the kernels on a GPU, every type at every alignment, if there is one; tools/gpu_check.py checks more."""

from __future__ import annotations

import pytest
from ddl_nccl.probe import gpu

from tools.gpu.kernels import check_kernels


@pytest.mark.timeout(600)
def test_kernels_on_the_gpu() -> None:
    missing = gpu()
    if missing:
        pytest.skip(f"no GPU: {missing}")
    rows = list(check_kernels(on_gpu=True))
    assert [row for row in rows if row.why] == []
