"""The script in docs/torch.md that uses transformers' Trainer prints what it says, and fails as it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks

(BLOCK,) = [block for page in PAGES for block in blocks(page) if block.run_by == "tests/docs/test_trainer.py"]

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(400)]


def launched(folder: Path, *words: str) -> tuple[int, str]:
    """The exit code of the script under ``ddl run``, and all output."""
    pytest.importorskip("transformers", reason="transformers is not installed (the extra `test` has it)")
    # On a host without GPUs, Trainer distributes only what is asked to run on the CPU.
    (folder / "train.py").write_text(
        BLOCK.code.replace("TrainingArguments(\n", "TrainingArguments(\n        use_cpu=True,\n")
    )
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins/ddl_torch/src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", "run", *words, "python", "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


def test_it_trains_without_torchs_variables(tmp_path: Path) -> None:
    """By the command that it shows, with the lines that it shows."""
    _, _, told = BLOCK.code.partition("# $ ddl run ")
    command, _, lines = told.partition("\n")
    *words, python, script = command.split()
    assert (python, script) == ("python", "train.py")
    code, out = launched(tmp_path, *words)
    assert code == 0, out
    assert {line[2:] for line in lines.splitlines()} <= set(out.splitlines()), out
    assert list((tmp_path / "checkpoints").glob("checkpoint-*")), "rank 0 has saved nothing"


def test_it_is_refused_with_them(tmp_path: Path) -> None:
    """Trainer wraps the model; the error names the flag."""
    code, out = launched(tmp_path, "-np", "2")
    assert code != 0
    assert "ReducedTwice: parameters of this DistributedOptimizer (layer.weight) are also in a torch" in out, out
    assert "`ddl run --no-torch-env`" in out
