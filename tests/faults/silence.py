"""Jobs in which ranks fall silent: what the launcher says of it, how soon, and how soon it has ended them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.launch.standin import install_ssh
from tests.launch.starting import DDL, environment

__all__ = ["Case", "Result", "pause_all", "play"]

DEADLINE_S = 120.0  # for a whole job, on a machine that does much else
PROGRAM = """
import ctypes, json, os, signal, subprocess, time
case = json.loads(os.environ["CASE"])
if case["hosts"] > 1:
    import torch.distributed  # what carries tensors across hosts; loading it holds the interpreter lock for seconds
import numpy, ddlcore as ddl

rank = int(os.environ["RANK"])
shown = os.environ["SHOWN"]

def fall_silent():
    if rank not in case["silent"]:
        return
    open(f"{shown}.{rank}.part", "w").write(repr(time.time()))
    os.rename(f"{shown}.{rank}.part", f"{shown}.{rank}")
    if case["how"] == "stop":
        if case["wakes_s"]:
            subprocess.Popen(["sh", "-c", f"sleep {case['wakes_s']}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        ctypes.PyDLL(None).sleep(100 if not case["wakes_s"] else int(case["wakes_s"]))

# Loading what is needed takes some ranks much longer than others on a busy machine: that is no part of the case.
open(f"{shown}.ready.{rank}", "w")
until_s = time.monotonic() + 60
while not all(os.path.exists(f"{shown}.ready.{one}") for one in range(case["size"])) and time.monotonic() < until_s:
    time.sleep(0.02)
if case["phase"] == "init":
    fall_silent()
ddl.init()
names = "abcd"
silent_at = {"negotiation": 1, "replay": 30}.get(case["phase"], -1)
for step in range(60):
    ones = [numpy.full(20000, step, numpy.float32) for _ in names]
    if case["overlap"]:
        handles = []
        for i, name in enumerate(names):
            if step == silent_at and i == 2:
                assert (ddl.stats()["buckets_replayed"] > 0) is (case["phase"] == "replay")
                fall_silent()
            handles.append(ddl.allreduce_async(ones[i], name=name, op=ddl.Sum))
        found = [handle.wait() for handle in handles]
    else:
        found = []
        for i, name in enumerate(names):
            if step == silent_at and i == 2:
                assert (ddl.stats()["buckets_replayed"] > 0) is (case["phase"] == "replay")
                fall_silent()
            found.append(ddl.allreduce(ones[i], name=name, op=ddl.Sum))
    assert all((one == step * ddl.size()).all() for one in found)
    if case["phase"] == "pause":
        if step == 30:
            open(f"{shown}.{rank}", "w").write(str(os.getpid()))
        time.sleep(0.05)
if case["wakes_s"]:
    time.sleep(3)  # the launcher looks twice a second
if case["phase"] == "shutdown":
    from ddlcore.runtime.engine import Engine

    stop = Engine.stop

    def stop_late(*arguments):  # behind the goodbye, before all is let go of
        fall_silent()
        return stop(*arguments)

    Engine.stop = stop_late
ddl.shutdown()
print("done", flush=True)
"""


@dataclass(frozen=True)
class Case:
    """One way to fall silent. ``how``: "stop" (SIGSTOP) or "lock" (a C call that holds the interpreter lock)."""

    how: str
    phase: str  # "init", "negotiation", "replay", "shutdown"; "pause": nobody, see ``play``
    overlap: bool = True
    hosts: int = 1
    size: int = 2
    silent: tuple[int, ...] = (1,)
    wakes_s: float = 0.0  # after how long the silent ranks go on; 0: never
    warning_s: float = 2.0
    shutdown_s: float = 4.0

    def name(self) -> str:
        """As ``pytest -k`` can ask for it."""
        ranks = "_".join(map(str, self.silent))
        overlap = "overlap" if self.overlap else "one_by_one"
        return f"{self.how}-{self.phase}-{overlap}-hosts_{self.hosts}-ranks_{ranks}_of_{self.size}"


@dataclass(frozen=True)
class Result:
    """How it went. Times are in seconds from the first rank's silence; None: it did not happen."""

    returncode: int
    report_s: float | None
    raised_s: float | None  # the first rank's DeadlineExceeded
    end_s: float  # of the last rank: the launcher tells it, or has ended itself
    told: str  # all that the launcher and the ranks wrote to stderr
    out: str


def play(case: Case, folder: Path, meanwhile: Callable[[int, Path], None] | None = None) -> Result:
    """Runs the job of ``case`` in ``folder``, which is new. ``meanwhile(launcher, shown)`` runs beside it."""
    folder.mkdir(parents=True)
    shown = folder / "silent"
    names = ",".join(f"h{host + 1}:{case.size // case.hosts}" for host in range(case.hosts))
    hosts = ["-H", names] if case.hosts > 1 else ["-np", str(case.size)]
    extra = install_ssh(folder / "bin") if case.hosts > 1 else {}
    settings = {
        "DDL_STALL_WARNING_S": f"{case.warning_s:g}",
        "DDL_STALL_SHUTDOWN_S": f"{case.shutdown_s:g}",
        "DDL_OVERLAP": "on" if case.overlap else "off",
        "CASE": json.dumps(asdict(case)),
        "SHOWN": str(shown),
    }
    process = subprocess.Popen(
        [*DDL, "run", *hosts, sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env=environment({**extra, **settings}),
    )
    lines: list[tuple[float, str]] = []
    out: list[str] = []
    helpers = [
        threading.Thread(target=_read, args=(process.stderr, lambda line: lines.append((time.time(), line)))),
        threading.Thread(target=_read, args=(process.stdout, out.append)),
    ]
    if meanwhile is not None:
        helpers.append(threading.Thread(target=meanwhile, args=(process.pid, shown)))
    for helper in helpers:
        helper.start()
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
    over_at = time.time()
    for helper in helpers:
        helper.join()
    begun = [float(path.read_text()) for path in folder.glob("silent.[0-9]")] if case.phase != "pause" else []
    ended_at = next((at for at, line in lines if "failed first:" in line), over_at)
    begun_at = min(begun, default=over_at)
    reports = [at for at, line in lines if "stalled for more than" in line and line.startswith("ddl run:")]
    report_s = reports[0] - begun_at if reports else None
    raised = [at for at, line in lines if "DeadlineExceeded: stalled" in line]
    raised_s = raised[0] - begun_at if raised else None
    return Result(
        process.returncode, report_s, raised_s, ended_at - begun_at, "".join(line for _, line in lines), "".join(out)
    )


def _read(stream: object, take: Callable[[str], None]) -> None:
    for line in stream:  # type: ignore[attr-defined]  # a text stream
        take(line)


def pause_all(pause_s: float, size: int) -> Callable[[int, Path], None]:
    """What stops the launcher, agents and ranks of a job, all of them, and lets them go on after ``pause_s``."""

    def pause(launcher: int, shown: Path) -> None:
        files = [Path(f"{shown}.{rank}") for rank in range(size)]
        until_s = time.monotonic() + DEADLINE_S / 2
        while not all(file.exists() and file.read_text() for file in files):
            if time.monotonic() > until_s:
                return
            time.sleep(0.02)
        ranks = [int(file.read_text()) for file in files]
        everyone = list(dict.fromkeys([launcher, *map(_parent, ranks), *ranks]))
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(pause_s)
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return pause


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
