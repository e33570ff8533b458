"""Runs between mpiexec and a rank: records how the rank ended, and stays until the job is over. Started by jobs.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(folder: Path, command: list[str]) -> None:
    """Run the rank; ``folder`` has a file with each rank's additional environment, in the order of MPI's ranks."""
    own = int(
        next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK") if name in os.environ)
    )
    added = json.loads((folder / "ranks.json").read_text())[own]
    rank = added["DDL_RANK"]
    with open(folder / f"{rank}.out", "w") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **added, "PYTHONUNBUFFERED": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            close_fds=False,  # keeps the descriptor by which MPI's ranks talk to mpiexec
        )
        (folder / f"{rank}.pid").write_text(str(process.pid))
        process.wait()
    (folder / f"{rank}.new").write_text(str(process.returncode))
    (folder / f"{rank}.new").rename(folder / f"{rank}.code")
    until_s = time.monotonic() + 60
    while not (folder / "over").exists() and time.monotonic() < until_s:
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
