"""Launched ranks form a world: what one computes reaches the others, and what one suffers is told of it alone."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

import ddlcore
from ddlcore.errors import RankFailed
from tests.launch.starting import Ddl

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory among processes is for Linux"),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.long
def test_the_numpy_example(ddl: Ddl) -> None:
    """Four ranks agree on a sum, and rank 0 says so."""
    done = ddl("run", "-np", "4", "python", str(EXAMPLES / "numpy_allreduce.py"), "--elements", "1000")
    assert done.returncode == 0, done.stderr
    assert "[0] 4 ranks agree: every element is 10" in done.stdout
    assert re.search(r"\[0\] init took [\d.]+ s, an allreduce of .* MiB [\d.]+ s", done.stdout)


def summed(value: int) -> tuple[int, int, list[int]]:
    import numpy as np

    import ddlcore as ddl

    ddl.init()
    total = ddl.allreduce(np.array([value + ddl.rank()]), op=ddl.Sum, name="x")
    return ddl.rank(), ddl.size(), total.tolist()


def test_a_function_in_a_world() -> None:
    """`ddlcore.run` starts ranks that find each other; the caller need not be one."""
    assert ddlcore.run(summed, (10,), num_proc=3) == [(rank, 3, [33]) for rank in range(3)]


def test_from_within_a_job() -> None:
    """A process that is a world of one may start ranks: they are not taken for its children."""
    ddlcore.init()
    try:
        assert ddlcore.run(summed, (1,)) == [(0, 2, [3]), (1, 2, [3])]
    finally:
        ddlcore.shutdown()


RAISES = """
import sys, ddlcore, numpy
ddlcore.init()
if ddlcore.rank() == 1:
    raise ValueError("the real cause")
ddlcore.allreduce(numpy.ones(4), name="x")
"""

LEAVES = """
import os, sys, ddlcore, numpy
ddlcore.init()
if ddlcore.rank() == 1:
    os._exit(7)
ddlcore.allreduce(numpy.ones(4), name="x")
"""


@pytest.mark.parametrize(("script", "code"), [(RAISES, 1), (LEAVES, 7)])
def test_the_first_failure_is_the_cause(script: str, code: int, ddl: Ddl) -> None:
    """Rank 0 raises PeerLost that names rank 1, soon; the summary blames rank 1 whoever ended first."""
    begun_s = time.monotonic()
    done = ddl("run", "-np", "2", "python", "-c", script)
    assert time.monotonic() - begun_s < 20.0
    assert done.returncode == code
    assert "PeerLost: rank 1 lost" in done.stderr
    assert "ddl run: rank 1 on " in done.stderr
    assert "rank 0: exited with code 1" in done.stderr


def fails_in_a_world() -> None:
    import numpy as np

    import ddlcore as ddl

    ddl.init()
    if ddl.rank() == 1:
        raise KeyError("the real cause")
    ddl.allreduce(np.ones(4), name="x")


def test_a_function_that_fails_in_a_world() -> None:
    """The exception of the rank that raised first comes back, not the PeerLost that followed."""
    with pytest.raises(RankFailed, match="rank 1 raised KeyError: 'the real cause'") as raised:
        ddlcore.run(fails_in_a_world)
    assert "rank 0: " in str(raised.value)
    assert "PeerLost" in str(raised.value)


def test_no_key_is_seen(ddl: Ddl) -> None:
    """Neither command line nor environment nor output of a launcher and its ranks holds a key of the job."""
    code = (
        "import os, json, subprocess\n"
        "keys = [v for k, v in json.load(open(os.environ['DDL_JOB_FILE'])).items() if 'secret' in k or 'public' in k]\n"
        "assert len(keys) >= 3, keys\n"
        "seen = open('/proc/self/environ').read()\n"
        "for pid in (os.getpid(), os.getppid()): seen += open(f'/proc/{pid}/cmdline').read()\n"
        "print(any(key in seen for key in keys))\n"
    )
    done = ddl("run", "-np", "1", "--verbose", "--log-level", "DEBUG", "python", "-c", code)
    assert done.stdout == "[0] False\n", done.stderr


def test_summary_says_where_the_files_are(ddl: Ddl, tmp_path: Path) -> None:
    """With --output-dir nothing of what a rank wrote is lost."""
    done = ddl("run", "-np", "1", "--output-dir", "out", "sh", "-c", "seq 50; exit 3")
    assert done.returncode == 3
    assert (tmp_path / "out" / "rank.0" / "stdout").read_text().count("\n") == 50
    assert os.path.join("out", "rank.0") in done.stderr
