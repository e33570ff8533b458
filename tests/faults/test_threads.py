"""A rank whose main thread has ended while another thread still stands in a collective: its peers hear of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
    import os, sys, threading, time
    import numpy as np
    import ddlcore as ddl

    ddl.init()
    rank = ddl.rank()
    ddl.allreduce(np.ones(3), name="first")

    def beside():
        try:
            ddl.allreduce(np.ones(3), name="nobody else asks")
        except ddl.DdlInternalError as error:
            print("THREAD", type(error).__name__, flush=True)

    if rank == 0:
        thread = threading.Thread(target=beside)
        thread.start()
        while not ddl.api.current_job().lookout.pending():
            time.sleep(0.01)
        {end}
    else:
        try:
            ddl.allreduce(np.ones(3), name="second")
        except ddl.PeerLost as error:
            print("PEER", error, flush=True)
"""


def run(end: str) -> str:
    program = (
        textwrap.dedent(PROGRAM)
        .replace("{end}", end)
        .replace("import ddlcore as ddl", "import ddlcore as ddl, ddlcore.api", 1)
    )
    command = [
        sys.executable,
        "-m",
        "ddlcore.launch",
        "run",
        "-np",
        "2",
        "--leave-timeout-s",
        "1",
        sys.executable,
        "-c",
        program,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.stdout + done.stderr


def test_an_exception_ends_the_rank_though_a_thread_waits() -> None:
    """Python would join the thread first, which waits for a peer that waits for this rank."""
    out = run("raise KeyError('of the main thread')")
    assert "THREAD Closed" in out, out
    assert "PEER rank 0 lost" in out, out
    assert "raised KeyError" in out, out


@pytest.mark.long
def test_the_end_of_the_script_ends_the_rank_when_its_thread_comes_no_further() -> None:
    out = run("pass")
    assert "THREAD Closed" in out, out
    assert "PEER rank 0 lost" in out, out
    assert "ended its main thread while another one waited for 'allreduce.nobody else asks'" in out, out


@pytest.mark.long
def test_a_thread_that_comes_on_goes_on() -> None:
    """A script may leave its training to a thread, and end: nothing is cut off, whatever it takes."""
    program = """
        import threading, time
        import numpy as np
        import ddlcore as ddl

        ddl.init()

        def train():
            for step in range(20):
                time.sleep(0.1)
                x = ddl.allreduce(np.ones(3), name="x", op=ddl.Sum)
            print("ALL", x[0], flush=True)

        threading.Thread(target=train).start()
    """
    command = [
        sys.executable,
        "-m",
        "ddlcore.launch",
        "run",
        "-np",
        "2",
        "--leave-timeout-s",
        "20",
        sys.executable,
        "-c",
    ]
    done = subprocess.run(
        [*command, textwrap.dedent(program)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("ALL 2.0") == 2
