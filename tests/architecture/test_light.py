"""Importing ddlcore, and listing what is installed, is quick: no framework and no compiler is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

HEAVY = re.compile(r"\b(ssl|torch|tensorflow|mxnet|keras|numba|llvmlite|rich|skopt|sklearn|scipy)\b")
LIST_PLUGINS = """
from ddlcore.config.loading import load_settings
from ddlcore.plug import load_plugins
r = load_plugins(load_settings({}))
for table in (r.transports, r.adapters, r.fusion_policies, r.compressors, r.launchers, r.bench_peers, r.commands):
    for provider in table.values():
        r.missing(provider)
"""


@pytest.mark.parametrize("code", ["import ddlcore", LIST_PLUGINS], ids=["import ddlcore", "list plugins"])
def test_nothing_heavy_is_imported(code: str) -> None:
    """A fresh interpreter that runs ``code`` has imported none of the heavy libraries."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert "ddlcore" in modules
    assert [module for module in modules if HEAVY.fullmatch(module.partition(".")[0])] == []
