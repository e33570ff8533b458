"""Collectives between parts of a graph that XLA compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.ddl_tf.tests.launching import PROGRAMS, launch


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "flags", "compiled"),
    [
        ("named", "", "inference_"),
        ("chosen", "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=1", "cluster_"),
    ],
)
def test_collectives_between_compiled_parts(
    way: str, flags: str, compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are those of eager execution, and XLA has compiled at least two parts of the function."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path}")
    monkeypatch.setenv("TF_XLA_FLAGS", flags)
    shown = launch(2, PROGRAMS / "xla.py", way)
    assert shown.count("equal") == 2, shown
    modules = {path.name.partition(".")[2] for path in tmp_path.glob("module_*before_optimizations.txt")}
    assert sum(compiled in name for name in modules) >= 2, modules
