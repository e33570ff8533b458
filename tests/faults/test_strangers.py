"""Another user of this host cannot end a job, slow it to a stop, or take its memory: a flood costs strangers only."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddlcore.control.client import connect
from ddlcore.control.server import Server
from ddlcore.messages.to_rank import Answer, Welcome
from tests.control.echo import PATIENCE_S, EchoCoordinator, greet, request
from tests.launch.starting import DDL, environment

NOBODY = 65534
FLOOD = str(Path(__file__).with_name("flood.py"))
MOST_GROWTH = 50 << 20
PATIENT_S = 50.0

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc, as ddl does on Linux"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process of another user"),
]

TRAIN = """
import os, pathlib, sys, time
import numpy as np
import ddlcore as ddl
from ddlcore.control.credentials import read_job_file

place = pathlib.Path(sys.argv[1])
ddl.init()
if ddl.rank() == 0:
    (place / "half").write_text(f"{os.getppid()} {read_job_file(os.environ['DDL_JOB_FILE']).endpoint}")
    os.replace(place / "half", place / "there")
x, steps, stop = np.ones(1000, np.float32), 0, 0.0
while not stop:
    for i in range(20):
        assert ddl.allreduce(x, name="x", op=ddl.Sum)[0] == ddl.size()
    steps += 1
    done = np.array([float((place / "stop").exists())], np.float32)
    stop = ddl.allreduce(done, name=f"stop.{steps}", op=ddl.Sum)[0]  # a new name: the coordinator is asked each time
print("steps", steps)
ddl.shutdown()
"""


def peak_bytes(pid: int) -> int:
    """The most memory that ``pid`` has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def flood(seconds: float, *endpoints: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", FLOOD, str(NOBODY), str(seconds), *endpoints]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def await_file(path: Path, job: subprocess.Popen[str]) -> str:
    end_s = time.monotonic() + PATIENT_S
    while not path.exists():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < end_s, f"no {path.name}"
        time.sleep(0.05)
    return path.read_text()


def few_files() -> None:
    """As many as a shell of many systems gives: a flood of 2000 connections is more."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


def train_under_a_flood(tmp_path: Path, address: str, seconds: float) -> dict[str, int]:
    """Trains on two ranks, floods what they and their launcher listen at, and returns what the flood has to tell."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    extra = {"DDL_CONTROL_ADDRESS": address} if address else {}
    command = [*DDL, "run", "-np", "2", sys.executable, str(script), str(tmp_path)]
    job = subprocess.Popen(
        command,
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=few_files,
    )
    try:
        parent, endpoint = await_file(tmp_path / "there", job).split()
        assert int(parent) == job.pid
        before = peak_bytes(job.pid)
        with flood(seconds, endpoint) as strangers:
            told = json.loads(strangers.communicate(timeout=seconds + PATIENT_S)[0])
        assert job.poll() is None, job.communicate()
        grown = peak_bytes(job.pid) - before
        (tmp_path / "stop").touch()
        out, err = job.communicate(timeout=PATIENT_S)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, err
    assert out.count("steps") == 2
    assert grown < MOST_GROWTH
    assert len(err.splitlines()) < 20, err
    return dict(told)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:0"], ids=["unix", "tcp"])
def test_a_job_outlives_a_flood(tmp_path: Path, address: str) -> None:
    """Thousands of connections of another user, some with large frames: it ends normally, and no larger than before."""
    told = train_under_a_flood(tmp_path, address, 3.0)
    assert told["connected"] == 0 if not address else told["connected"] > 0, told


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:0"], ids=["unix", "tcp"])
def test_a_job_outlives_a_long_flood(tmp_path: Path, address: str) -> None:
    """The same for 20 s."""
    train_under_a_flood(tmp_path, address, 20.0)


@pytest.fixture(params=["own", "by name", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server at each kind of socket that there is."""
    address = "tcp://127.0.0.1:0" if request.param == "tcp" else ""
    served = Server(2, EchoCoordinator(), address, lambda text: None, by_line=request.param == "by name")
    served.start()
    yield served
    served.close()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_ranks_get_in_during_a_flood(server: Server) -> None:
    """One rank after the other comes, is answered and goes, whatever strangers do; the server keeps few files of theirs."""
    before, files = peak_bytes(os.getpid()), len(os.listdir("/proc/self/fd"))
    most = files
    with flood(2.0, server.endpoint) as strangers:
        served = 0
        while strangers.poll() is None or not served:
            channel, store = connect(server.job_file, served % 2)
            try:
                assert greet(channel, served % 2) == [Welcome(f"for {served % 2}")]
                channel.send(request(1))
                assert channel.receive(PATIENCE_S) == [Answer(0, 1, ())]
                store.set("key", b"value")
            finally:
                channel.close()
                store.close()
            most = max(most, len(os.listdir("/proc/self/fd")))
            served += 1
        assert strangers.stdout is not None
        told = json.loads(strangers.stdout.read())
    assert sum(told.values()) > 0
    assert most - files < 200
    assert peak_bytes(os.getpid()) - before < MOST_GROWTH
