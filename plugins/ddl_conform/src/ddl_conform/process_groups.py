"""Tests a backend of torch.distributed: random programs, and a rank that is killed. Each rank is a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddl_conform.standard import StandardSuite

__all__ = ["ProcessGroupSuite"]

LIMIT_S = 120.0  # for all that the ranks do


class ProcessGroupSuite(StandardSuite):
    """The tests that a backend of torch.distributed must pass, on the CPU.

    ``group_backend``: its name, as ``init_process_group`` takes it. ``group_programs``: how many random programs each test
    runs. Their calls are collectives of all kinds, synchronous or not, in groups that overlap. Every result must be what
    torch's Gloo gives, or would give if it had the type, the operation and the layout.
    """

    group_backend = ""
    group_programs = 20

    @pytest.mark.parametrize("size", [2, 3])
    def test_random_programs_of_a_process_group(self, size: int, tmp_path: Path) -> None:
        """Parts of each program repeat; works are waited for in another order than they began."""
        for rank, (code, text) in enumerate(self._run(size, tmp_path, ["--programs", str(self.group_programs)])):
            assert code == 0, f"rank {rank} of {size}:\n{text}"

    def test_a_process_group_names_a_rank_that_is_killed(self, tmp_path: Path) -> None:
        *others, (code, _) = self._run(3, tmp_path, [])
        assert code == -signal.SIGKILL
        for rank, (other, text) in enumerate(others):
            assert other == 0, f"rank {rank}:\n{text}"

    def _run(self, size: int, folder: Path, more: list[str]) -> list[tuple[int, str]]:
        """Return the exit codes and the output of the ranks."""
        program = [sys.executable, "-m", "ddl_conform.c10d.programs", "--backend", self.group_backend]
        store = ["--size", str(size), "--store", str(folder / "store")]
        ranks = [
            subprocess.Popen(
                [*program, *store, *more, "--rank", str(rank)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            texts = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [(rank.returncode, text) for rank, text in zip(ranks, texts)]
