"""Loops written for DDP, Lightning and Transformers come to the same as in one process: gradients are reduced when they clip."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.semantics.running import WORLDS_NEED, run_module

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason=WORLDS_NEED),
]

WORLDS = ("shm/00/off/replay", "shm/00/on/replay", "shm+gloo/01/on/replay", "shm+gloo/01/off/replay")
FOUR = (
    "shm/0/off/replay",
    "shm/0000/off/replay",
    "shm/0000/on/replay",
    "shm+gloo/0011/on/replay",
    "shm+gloo/0011/off/replay",
)


def check(loop: str, *worlds: str) -> None:
    lines, told = run_module("loops", loop, *worlds, timeout_s=500.0)
    by_world: dict[str, dict[str, Any]] = {line["spec"]: line for line in lines}
    for world in worlds:
        assert world in by_world, told
        found = by_world[world]
        assert found["learned"] > 1e-3, "nothing was learned, so the test shows nothing"
        assert found["distance"] <= 1e-10, f"{loop}: {found}"
        assert found["alike"], f"{loop}: the ranks of {world} differ"


def test_a_loop_written_for_ddp() -> None:
    """Backward, unscale, clip and step, on 1, 2 and 4 ranks of one host and of two, with overlap and without."""
    check("by_hand", *WORLDS, *FOUR)


def test_lightning() -> None:
    """A LightningModule whose Trainer clips gradients."""
    pytest.importorskip("lightning", reason="Lightning is not installed (the extra `test` has it)")
    check("lightning", *WORLDS)


def test_transformers() -> None:
    """A Trainer of Transformers with its defaults, which clip gradients."""
    pytest.importorskip("transformers", reason="Transformers is not installed (the extra `test` has it)")
    check("transformers", *WORLDS)
