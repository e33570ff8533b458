"""Ranks whose parameters differ after the last step: their scripts end without an error, and the job fails."""

from __future__ import annotations

import inspect
import struct
from pathlib import Path

import pytest

import ddlcore as ddl
from ddlcore.api import current_job
from ddlcore.api.replicas import Verifier, array_replica
from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.coordinator.sessions import Sessions
from ddlcore.errors import ReplicasDiffer
from ddlcore.launch.job.network import ObservedCoordinator
from ddlcore.messages.observing import Digests, Sample, Settle
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_coordinator import Bye, Hello
from ddlcore.runtime.patience import Patience
from tests.launch.starting import Ddl

EVERY_STEP = {"DDL_VERIFY_EVERY": "1", "DDL_LEAVE_TIMEOUT_S": "60"}


def train() -> str:
    """Make three steps, and change a weight of rank 1 before the last one."""
    import numpy as np

    ddl.init()
    weights = np.zeros(4, np.float32)
    verifier = Verifier("SGD", lambda: [array_replica("weights", weights)])
    for step in range(3):
        weights[1] = ddl.rank() * (step == 2)
        verifier.stepped(current_job())
    return "trained to the end"


PROGRAM = f"""
import ddlcore as ddl
from ddlcore.api import current_job
from ddlcore.api.replicas import Verifier, array_replica

{inspect.getsource(train)}
print(train(), flush=True)
"""


def test_a_difference_is_noted_though_all_ranks_leave_without_an_error() -> None:
    """ObservedCoordinator keeps the text of a difference that is found when all scripts have ended."""
    log = ObservedCoordinator(Sessions(2, ThresholdFusion(), Patience(warning_s=10.0)))
    for rank in range(2):
        log.handle(rank, Hello(rank, (0, 1), 1, PROTOCOL, "0.1.0", 1 << 20))
    for rank in range(2):
        digests = struct.pack("q", rank)
        log.handle(rank, Digests(0, "SGD", 10, b"names", digests, fatal=True, tensors=("bias (float32 2)",)))
        log.handle(rank, Settle())
    assert log.differ == ""
    for rank in range(2):
        log.handle(rank, Sample("float32", struct.pack("2f", 0.0, rank)))
    for rank in range(2):
        log.handle(rank, Bye("raised ReplicasDiffer: in its last steps"))
        log.rank_ended(rank, "exited with code 0")
    assert log.differ.startswith("the ranks' parameters differ (of SGD, after its step 10)"), log.differ
    assert "bias (float32 2)" in log.differ


@pytest.mark.processes
def test_the_run_fails_although_the_scripts_end_well(ddl: Ddl, tmp_path: Path) -> None:
    """`ddl run` exits with 1 and says once which tensor differs after which step."""
    (tmp_path / "train.py").write_text(PROGRAM)
    done = ddl("run", "-np", "2", "python", "train.py", env=EVERY_STEP)
    assert done.stdout.count("trained to the end") == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ddl run: the ranks' parameters differ")]
    assert "after its step 3" in line
    assert "weights (float32 4)" in line
    assert done.returncode == 1


@pytest.mark.processes
def test_the_call_of_a_function_raises_although_all_ranks_return() -> None:
    """``ddlcore.run`` raises ReplicasDiffer with the same text."""
    with pytest.raises(ReplicasDiffer, match=r"(?s)^the ranks' parameters differ.*after its step 3.*weights"):
        ddl.run(train, num_proc=2, env=EVERY_STEP)
