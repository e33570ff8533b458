"""Ranks of other hosts, started through an ``ssh`` that connects to nothing: the same output, ends and summary as here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ddlcore
from ddlcore.errors import DdlInternalError, RankFailed
from ddlcore.process.environment import TORCHRUN_VARIABLES
from tests.launch.standin import LOOPBACK, STAND_IN_WORKS, install_shell, install_ssh
from tests.launch.starting import DDL, Begin, Ddl, environment
from tests.launch.test_run import lines_of, said
from tests.tiers import long

pytestmark = [pytest.mark.processes, STAND_IN_WORKS]
Until = Callable[[Callable[[], bool]], None]
LONG_S = 100_000 + os.getpid()  # of a sleep that is told by it from those of others


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    return install_ssh(tmp_path / "bin")


@pytest.mark.long
def test_every_rank_says_who_it_is(ddl: Ddl, ssh: dict[str, str], tmp_path: Path) -> None:
    """Rank, local rank, host index, sizes; one environment, one meeting point, a port of its own for each rank."""
    code = "import json, os; json.dump(dict(os.environ), open(os.environ['RANK'], 'w'))"
    done = ddl(
        "run", "-H", "h1:2,localhost:1,h2:2", "--fusion-bytes", "5", "python", "-c", code, env={**ssh, "MINE": "x"}
    )
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(5)]
    keys = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [tuple(int(e[key]) for key in keys) for e in seen] == [
        (0, 0, 2, 0),
        (1, 1, 2, 0),
        (2, 0, 1, 1),
        (3, 0, 2, 2),
        (4, 1, 2, 2),
    ]
    for name in ("WORLD_SIZE", "DDL_HOST_INDEXES", "MASTER_ADDR", "MASTER_PORT", "MINE", "DDL_FUSION_BYTES", "PATH"):
        assert len({e[name] for e in seen}) == 1, name
    assert [e["DDL_ADDRESS"] for e in seen] == ["127.0.0.1"] * 5
    assert len({e["DDL_JOB_FILE"] for e in seen}) == 3, "each agent has its own network"
    workers = json.loads(seen[0]["TF_CONFIG"])["cluster"]["worker"]
    assert len(set(workers)) == 5
    assert [json.loads(e["TF_CONFIG"])["task"]["index"] for e in seen] == [0, 1, 2, 3, 4]


def test_output_is_whole_and_carries_its_rank(ddl: Ddl, ssh: dict[str, str]) -> None:
    """Far more than is ever under way, from both streams, of ranks that end right after it."""
    script = "seq 60000; seq 20000 >&2; printf last"
    done = ddl("run", "-H", "h1:1,h2:2", "sh", "-c", script, env=ssh)
    assert done.returncode == 0
    expected = [str(i) for i in range(1, 60001)]
    assert lines_of(done.stdout) == {rank: [*expected, "last"] for rank in range(3)}
    errors = [line for line in done.stderr.splitlines() if line.startswith("[1] ")]
    assert errors == [f"[1] {i}" for i in range(1, 20001)]


@pytest.mark.long
def test_files_of_each_rank_lie_with_the_launcher(ddl: Ddl, ssh: dict[str, str], tmp_path: Path) -> None:
    """--output-dir holds what every rank wrote, wherever it ran."""
    done = ddl("run", "-H", "h1:1,h2:1", "--output-dir", "out", "sh", "-c", "echo $RANK; echo e >&2", env=ssh)
    assert done.returncode == 0
    found = {str(path.relative_to(tmp_path / "out")): path.read_text() for path in (tmp_path / "out").rglob("std*")}
    assert found == {f"rank.{r}/std{s}": t for r in (0, 1) for s, t in (("out", f"{r}\n"), ("err", "e\n"))}


@pytest.mark.parametrize("rank", [1, *long(0)])
@pytest.mark.parametrize(
    ("script", "code", "how"),
    [("exit 3", 3, "exited with code 3"), *long(("kill -9 $$", 137, r"was killed by signal 9 \(SIGKILL\)"))],
)
def test_the_first_failure_names_its_host(
    rank: int, script: str, code: int, how: str, ddl: Ddl, ssh: dict[str, str]
) -> None:
    """Rank, host, end and last lines; the others are ended after the grace; the exit code is the first one's."""
    ranks = f"if [ $RANK = {rank} ]; then seq 30; {script}; fi; sleep 300 & wait"
    begun_s = time.monotonic()
    done = ddl("run", "-H", "h1:1,h2:1", "--grace-s", "0.3", "sh", "-c", ranks, env=ssh)
    assert time.monotonic() - begun_s < 20.0
    assert done.returncode == code
    text = "\n".join(said(done))
    assert re.search(rf"rank {rank} on h{rank + 1} failed first: it {how}", text)
    assert [line[4:] for line in text.splitlines() if line.startswith("  | ")] == [str(i) for i in range(11, 31)]
    assert f"rank {1 - rank}: was ended by the launcher" in text


@pytest.mark.long
def test_rank_0_elsewhere_reads_stdin(ssh: dict[str, str], tmp_path: Path) -> None:
    """More than a pipe holds; the other ranks have none."""
    text = "".join(f"{i}\n" for i in range(60000))
    done = subprocess.run(
        [*DDL, "run", "-H", "h1:1,h2:1", "cat"],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment(ssh),
    )
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == {0: text.split()}


def test_no_secret_is_on_a_command_line(ddl: Ddl, ssh: dict[str, str], tmp_path: Path) -> None:
    """What ssh was called with holds no key; nor does a rank's environment."""
    code = "import json, os; print(json.dumps(json.load(open(os.environ['DDL_JOB_FILE']))))"
    done = ddl("run", "-H", "h1:1,h2:1", "-p", "2222", "-i", "/k", "python", "-c", code, env=ssh)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "bin" / "ssh.log").read_text()
    assert log.count("-p 2222 -i /k") == 2
    assert "BatchMode=yes" in log and "StrictHostKeyChecking=accept-new" in log
    assert not re.search(
        r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}", re.sub(r"/\S+|\S+=\S+", "", log.replace(code, ""))
    )


@pytest.mark.long
def test_a_remote_shell_without_standard_input(ddl: Ddl, tmp_path: Path) -> None:
    """As Kubeflow's: the agent makes its own keys, tells the public one, and all the rest is as ever."""
    shell = install_shell(tmp_path / "bin")
    (tmp_path / "hostfile").write_text("worker-0 slots=2\nworker-1 slots=1\n")
    done = ddl("run", "--hostfile", "hostfile", "sh", "-c", "echo $RANK of $WORLD_SIZE; exit $RANK", env=shell)
    assert lines_of(done.stdout) == {rank: [f"{rank} of 3"] for rank in range(3)}
    assert done.returncode in (1, 2)
    log = (tmp_path / "bin" / "rsh.log").read_text()
    assert [line.split()[0] for line in log.splitlines()] == ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("host", "complaint"),
    [
        ("refuses", "refuses: it does not accept our key; try `ssh refuses true`"),
        ("unknown", "unknown: no such host"),
        ("down", "down: no route leads to it"),
        *long(("silent", "silent: its agent does not answer")),
        ("bare", "bare: there is no /no/such/python"),
        ("older", "older: its agent ended with code 1: Python"),
        ("former", "former: its agent ended with code 1: ddlcore"),
    ],
)
def test_one_bad_host_is_named_and_nothing_starts(
    host: str, complaint: str, ddl: Ddl, ssh: dict[str, str], tmp_path: Path
) -> None:
    """One line, exit code 2, no rank anywhere."""
    done = ddl("run", "-H", f"h1:1,{host}:1", "--start-timeout-s", "5", "touch", "started", env=ssh)
    assert done.returncode == 2, done.stderr
    assert (done.stderr.count("\n"), done.stdout) == (1, "")
    assert done.stderr.startswith("ddl run: nothing was started: ")
    assert complaint in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.long
def test_several_bad_hosts_are_a_table(ddl: Ddl, ssh: dict[str, str], tmp_path: Path) -> None:
    """A row for each host, good ones too, and what is missing there: a script that only this host could see, say."""
    done = ddl("run", "-H", "h1:1,refuses:1,h2:1,unknown:1", "touch", "started", env=ssh)
    rows = [re.split(r"  +", line.removeprefix("ddl run: ")) for line in done.stderr.splitlines()]
    assert done.returncode == 2
    assert [row[0] for row in rows[:-1]] == ["host", "h1", "refuses", "h2", "unknown"]
    assert [row[-1] for row in rows[1:4:2]] == ["ok", "ok"]
    assert rows[-1] == ["nothing was started: refuses, unknown cannot take part"]
    assert not (tmp_path / "started").exists()


@pytest.mark.long
def test_an_interface_that_does_not_exist(ddl: Ddl, ssh: dict[str, str], tmp_path: Path) -> None:
    """It is named with those that there are, whether it is missing here or there."""
    done = ddl("run", "-H", "h1:1", "--network-interface", "eth77", "touch", "started", env=ssh)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no network interface is called eth77" in done.stderr
    assert "lo (127.0.0.1)" in done.stderr


@pytest.mark.long
def test_a_port_that_is_taken_elsewhere(ddl: Ddl, ssh: dict[str, str]) -> None:
    """MASTER_PORT is looked after on the host where rank 0 is to listen."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = ddl("run", "-H", "h1:2", "true", env={**ssh, "MASTER_PORT": str(port)})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"h1: port {port} (MASTER_PORT) is taken" in done.stderr


def test_no_ssh_at_all(ddl: Ddl, tmp_path: Path) -> None:
    """It is named."""
    (tmp_path / "empty").mkdir()
    done = ddl("run", "-H", "h1:1", "/bin/true", env={**LOOPBACK, "PATH": str(tmp_path / "empty")})
    assert (done.returncode, done.stderr) == (2, "ddl run: no agent can be started: there is no program ssh here\n")


@pytest.mark.long
def test_a_port_that_is_taken_where_nobody_meets(ddl: Ddl, ssh: dict[str, str]) -> None:
    """MASTER_PORT matters on rank 0's host alone: here both are one machine, so only one host is blamed."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = ddl("run", "-H", "h1:1,h2:1", "true", env={**ssh, "MASTER_PORT": port})
    assert done.returncode == 2
    assert "h1: port" in done.stderr and "h2" not in done.stderr


def test_a_program_that_is_not_there(ddl: Ddl, ssh: dict[str, str], tmp_path: Path) -> None:
    """Looked for in the job's directory, on the host."""
    (tmp_path / "here.sh").write_text("#!/bin/sh\n")
    (tmp_path / "here.sh").chmod(0o755)
    assert ddl("run", "-H", "h1:1", "./here.sh", env=ssh).returncode == 0


def processes_of(mark: str) -> list[int]:
    """Processes whose command line has ``mark`` in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_a_killed_launcher_leaves_nothing(begin: Begin, until: Until, ssh: dict[str, str], tmp_path: Path) -> None:
    """kill -9 of `ddl run`: agents notice, kill their ranks with all that these began, and end."""
    process = begin("run", "-H", "h1:1,h2:1", "sh", "-c", f"touch up.$RANK; sleep {LONG_S} & wait", env=ssh)
    until(lambda: len(list(tmp_path.glob("up.*"))) == 2)
    process.kill()
    until(lambda: processes_of(f"sleep\0{LONG_S}") == [])


@pytest.mark.long
def test_a_stopped_launcher_is_a_lost_one(begin: Begin, until: Until, ssh: dict[str, str], tmp_path: Path) -> None:
    """Silence of about 3 s: the agents kill their ranks."""
    process = begin("run", "-H", "h1:1,h2:1", "sh", "-c", f"touch up.$RANK; sleep {LONG_S} & wait", env=ssh)
    until(lambda: len(list(tmp_path.glob("up.*"))) == 2)
    until(lambda: len(processes_of(f"sleep\0{LONG_S}")) == 2)  # each begins a moment after its file
    process.send_signal(signal.SIGSTOP)
    begun_s = time.monotonic()
    until(lambda: processes_of(f"sleep\0{LONG_S}") == [])
    assert 2.0 < time.monotonic() - begun_s < 20.0
    process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, *long(signal.SIGSTOP)])
def test_a_lost_agent_is_a_lost_host(
    number: signal.Signals, begin: Begin, until: Until, ssh: dict[str, str], tmp_path: Path
) -> None:
    """Its ranks count as lost at once (or after 3 s of silence), and the summary says so."""
    process = begin(
        "run",
        "-H",
        "h1:1,h2:1",
        "--grace-s",
        "0.2",
        "sh",
        "-c",
        "echo $PPID > pid.$RANK; echo up; exec sleep 60",
        env=ssh,
    )
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}  # so the launcher knows of both
    agent = int((tmp_path / "pid.1").read_text())
    begun_s = time.monotonic()
    os.kill(agent, number)
    _, err = process.communicate(timeout=80)
    assert time.monotonic() - begun_s < 20.0
    assert process.returncode == 255, err
    assert re.search(r"rank 1 on h2 failed first: it was lost after \d+\.\d s: its host h2 is gone \(.+\)\n", err)
    assert "rank 0: was ended by the launcher" in err
    if number == signal.SIGSTOP:
        assert "no message from it for 3 s" in err
        os.kill(agent, signal.SIGCONT)
    others = [int(path.read_text()) for path in tmp_path.glob("pid.*")]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others))


def test_signals_reach_every_rank(begin: Begin, until: Until, ssh: dict[str, str], tmp_path: Path) -> None:
    """SIGUSR1 goes to the ranks alone, Ctrl-C to all, and ends the job."""
    script = 'trap "echo usr" USR1; trap "echo int; exit 0" INT; touch up.$RANK; while :; do sleep 0.1; done'
    process = begin("run", "-H", "h1:1,localhost:1", "sh", "-c", script, env=ssh)
    until(lambda: len(list(tmp_path.glob("up.*"))) == 2)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=80)
    assert lines_of(out) == {0: ["usr", "int"], 1: ["usr", "int"]}, err


def test_a_signal_to_an_agent_is_for_its_ranks(begin: Begin, until: Until, ssh: dict[str, str], tmp_path: Path) -> None:
    """As Slurm's --signal sends it to each step of a job; the agent itself would end by it."""
    script = (
        'trap "echo usr1" USR1; trap "echo usr2; exit 0" USR2; echo $PPID > agent.$RANK.new; '
        "mv agent.$RANK.new agent.$RANK; while :; do sleep 0.1; done"
    )
    process = begin("run", "-H", "h1:2,localhost:1", "sh", "-c", script, env=ssh)
    until(lambda: len(list(tmp_path.glob("agent.?"))) == 3)
    agent = int((tmp_path / "agent.0").read_text())
    os.kill(agent, signal.SIGUSR1)
    time.sleep(0.5)
    os.kill(agent, signal.SIGUSR2)
    process.send_signal(signal.SIGUSR2)
    out, err = process.communicate(timeout=80)
    lines = lines_of(out)
    assert process.returncode == 0 and lines[0][:2] == lines[1][:2] == ["usr1", "usr2"] and lines[2] == ["usr2"], err


def test_an_interrupt_before_the_start(begin: Begin, until: Until, ssh: dict[str, str], tmp_path: Path) -> None:
    """Ctrl-C while a host does not answer: 130, and nothing stays."""
    process = begin("run", "-H", "h1:1,silent:1", "touch", "started", env=ssh)
    until(lambda: "silent exec" in (log.read_text() if (log := tmp_path / "bin" / "ssh.log").exists() else ""))
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err and "Traceback" not in err
    assert not (tmp_path / "started").exists()


@pytest.mark.long
def test_a_reader_that_stalls_holds_up_the_rank_and_no_verdict(
    ssh: dict[str, str], tmp_path: Path, until: Until
) -> None:
    """A rank that writes without end is held up by a screen that nobody reads; a death is noticed all the same."""
    script = (
        "if [ $RANK = 0 ]; then echo $$ > pid; exec yes; fi; "
        "while [ ! -s pid ]; do sleep 0.05; done; sleep 0.5; kill -9 $$"
    )
    process = subprocess.Popen(
        [*DDL, "run", "-H", "h1:1,h2:1", "--grace-s", "0.2", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(ssh),
    )
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and bool(pid.read_text().strip()))
    until(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists())
    resident = Path(f"/proc/{process.pid}/status").read_text()
    out, err = process.communicate(timeout=80)
    assert process.returncode == 137
    assert set(out.splitlines()) == {b"[0] y"}
    assert b"rank 1 on h2" in err
    assert int(re.findall(r"VmHWM:\s+(\d+) kB", resident)[0]) < 200_000, "it fills no memory"


def test_a_dry_run_starts_nothing(ddl: Ddl, ssh: dict[str, str], tmp_path: Path) -> None:
    """Ranks, environment and commands, no key, and ssh is not called."""
    done = ddl("run", "-H", "h1:2,localhost:1", "--dry-run", "touch", "started", env=ssh)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:5]]
    assert [(row[0], row[1]) for row in rows] == [("0", "h1"), ("1", "h1"), ("2", "localhost")]
    assert "  ssh -T -oBatchMode=yes" in done.stdout
    assert "RANK=2" in done.stdout and "MASTER_PORT=<free port of h1>" in done.stdout
    assert "secret" not in done.stdout
    assert "exec" not in (tmp_path / "bin" / "ssh.log").read_text(), "it is asked what it knows of a name, no more"
    assert not (tmp_path / "started").exists()


def whose(base: int) -> tuple[int, str]:
    rank = int(os.environ["RANK"])
    print(f"rank {rank}")
    return base + rank, os.environ["GROUP_RANK"]


def fails(base: int) -> int:
    if os.environ["RANK"] == "1":
        raise KeyError("of rank 1")
    time.sleep(30)
    return 0


@pytest.fixture
def ssh_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is this very process's ``ssh``."""
    for name, value in install_ssh(tmp_path / "bin").items():
        monkeypatch.setenv(name, value)


@pytest.mark.long
@pytest.mark.usefixtures("ssh_here")
def test_a_function_across_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """Results come in rank order, from here and there, large ones too; what ranks print is seen."""
    assert ddlcore.run(whose, (10,), hosts="h1:1,localhost:1,h2:2") == [(10, "0"), (11, "1"), (12, "2"), (13, "2")]
    assert set(capsys.readouterr().out.splitlines()) == {f"[{rank}] rank {rank}" for rank in range(4)}
    left_out = ddlcore.run(
        lambda: [name for name in TORCHRUN_VARIABLES if name in os.environ], hosts="h1:1", torch_env=False
    )
    assert left_out == [[]]
    large = b"x" * (3 << 20)
    assert ddlcore.run(lambda data: data + b"y", (large,), hosts="h1:2") == [large + b"y"] * 2


@pytest.mark.long
@pytest.mark.usefixtures("ssh_here")
def test_a_function_that_fails_elsewhere() -> None:
    """What was raised there is the cause here."""
    with pytest.raises(RankFailed, match="rank 1 raised KeyError: 'of rank 1'") as raised:
        ddlcore.run(fails, (1,), hosts="h1:1,h2:1", env={"DDL_GRACE_S": "0.2"})
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.usefixtures("ssh_here")
def test_a_function_where_a_host_is_missing() -> None:
    """One line, nothing started."""
    with pytest.raises(DdlInternalError, match=r"^run: nothing was started: refuses: it does not accept our key.*$"):
        ddlcore.run(whose, (1,), hosts="h1:1,refuses:1")


# --- what crosses the network while nothing is negotiated

STEADY = """
import os, time, numpy, ddlcore as ddl
ddl.init()
tensor = numpy.ones(64)
for step in range(60):
    ddl.allreduce(tensor, name="x")
before = ddl.stats()
open(f"agent.{ddl.rank()}", "w").write(str(os.getppid()))
while not (ddl.rank() == 0 and os.path.exists("stop")):
    ddl.allreduce(tensor, name="x")
    time.sleep(0.02)
    if step % 50 == 0:
        after = ddl.stats()
        open(f"steps.{ddl.rank()}", "w").write(
            f"{after['control_messages'] - before['control_messages']} {after['buckets_replayed']}"
        )
    step += 1
"""
BEAT_BYTES = 150  # at most: an empty message and what CURVE, ZeroMQ and its name add
WATCHED_S = 4.0


def bytes_of(pid: int) -> tuple[int, int]:
    """Sent and received by the TCP connections of a process, as the kernel counts them."""
    shown = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in shown.splitlines() if f"pid={pid}," in line]
    assert len(lines) == 1, f"one connection to the launcher, not {lines}"
    sent, received = (re.search(rf"{name}:(\d+)", lines[0]) for name in ("bytes_sent", "bytes_received"))
    assert sent and received
    return int(sent[1]), int(received[1])


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ddl_gloo") is None, reason="ddl-gloo is not installed")
@pytest.mark.skipif(shutil.which("ss") is None, reason="ss of iproute2 is not installed")
def test_steady_steps_cross_no_network(begin: Begin, until: Until, ssh: dict[str, str], tmp_path: Path) -> None:
    """Between a host and the launcher go beats alone, one a second each way, however many steps its ranks take."""
    process = begin("run", "-H", "h1:2,h2:1", "--backend", "gloo", "python", "-c", STEADY, env=ssh)
    paths = [tmp_path / f"agent.{rank}" for rank in (0, 1, 2)]
    until(lambda: process.poll() is not None or all(path.exists() and path.read_text() for path in paths))
    agents = sorted({int(path.read_text()) for path in paths})
    assert len(agents) == 2
    time.sleep(1.0)  # what came before has gone out
    before = {agent: bytes_of(agent) for agent in agents}
    time.sleep(WATCHED_S)  # this is what is measured
    after = {agent: bytes_of(agent) for agent in agents}
    for agent in agents:
        for way in (0, 1):
            grown = after[agent][way] - before[agent][way]
            assert 0 < grown <= (WATCHED_S + 2) * BEAT_BYTES, (agent, way, grown)
    messages, replayed = (tmp_path / "steps.1").read_text().split()
    assert (int(messages), int(replayed) > 50) == (0, True)
    (tmp_path / "stop").touch()
    process.communicate(timeout=80)
