"""Importing ddlcore, and listing what is installed, is quick, and a rank imports only those modules that it uses."""

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
# What a rank imports only if it has tensors on devices or belongs to an elastic job, and what runs
# in the launcher.
UNUSED = re.compile(
    r"ddlcore\.(runtime\.(device|recorder)|observe\.timeline_parts"
    r"|process\.elastic_member|control\.local|coordinator|launch|commands)(\..*)?"
)
MOST_LINES = 20_900  # in the modules of the core that such a rank imports: a little more than there were
RANK = """
import os, sys, numpy, ddlcore
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rank that sees a GPU imports what it needs for tensors there
ddlcore.init()
ddlcore.allreduce(numpy.ones(4), name="x")
ddlcore.shutdown()
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "ddlcore" and module.__file__.endswith(".py"):
        with open(module.__file__, encoding="utf-8") as text:
            print("imported", name, sum(1 for _ in text))
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with ``words``, and with the sources of this tree first on its path."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize("code", ["import ddlcore", LIST_PLUGINS], ids=["import ddlcore", "list plugins"])
def test_nothing_heavy_is_imported(code: str) -> None:
    """A fresh interpreter that runs ``code`` has imported none of the heavy libraries."""
    done = run("-X", "importtime", "-c", code)
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert "ddlcore" in modules
    assert [module for module in modules if HEAVY.fullmatch(module.partition(".")[0])] == []


def test_a_rank_imports_only_what_it_uses() -> None:
    """A rank that reduces an array in host memory imports no module of UNUSED, and at most MOST_LINES lines of ddlcore."""
    done = run("-m", "ddlcore", "run", "-np", "1", sys.executable, "-c", RANK)
    lines = dict(re.findall(r"imported (\S+) (\d+)", done.stdout))
    assert "ddlcore.process.parts" in lines, done.stdout
    assert [module for module in lines if UNUSED.fullmatch(module)] == []
    assert sum(map(int, lines.values())) <= MOST_LINES
