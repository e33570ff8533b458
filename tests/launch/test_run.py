"""``ddl run`` starts ranks, shows what they write, and ends as the first that failed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.starting import DDL, Ddl, environment

pytestmark = pytest.mark.processes


def lines_of(text: str) -> dict[int, list[str]]:
    """By rank, what it wrote."""
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"\[(\d+)\] (.*)", line)
        assert match, f"a line without its rank: {line!r}"
        found.setdefault(int(match[1]), []).append(match[2])
    return found


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if not line.startswith("[")]


def test_every_line_carries_its_rank_and_is_whole(ddl: Ddl) -> None:
    """Four ranks write at once, in small pieces and to both streams: no line is mixed, none is lost."""
    script = "for i in 1 2 3 4 5 6 7 8 9; do printf a$RANK; printf b$i; echo; echo e$RANK >&2; done; printf last"
    done = ddl("run", "-np", "4", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    expected = {rank: [f"a{rank}b{i}" for i in range(1, 10)] + ["last"] for rank in range(4)}
    assert lines_of(done.stdout) == expected
    errors = "\n".join(line for line in done.stderr.splitlines() if line.startswith("["))
    assert lines_of(errors) == {rank: [f"e{rank}"] * 9 for rank in range(4)}


@pytest.mark.long
def test_torchruns_variables_can_be_left_out(ddl: Ddl) -> None:
    """Also for one that the user has set; --dry-run shows it."""
    words = ("run", "-np", "2", "--no-torch-env")
    shown = 'echo "$DDL_RANK ${RANK-none} ${WORLD_SIZE-none} ${TF_CONFIG:+set}"'
    done = ddl(*words, "sh", "-c", shown, env={"WORLD_SIZE": "7"})
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == {rank: [f"{rank} none none set"] for rank in range(2)}
    plans = [ddl(*words[:3], *more, "--dry-run", "true").stdout for more in ((), words[3:])]
    assert ["\n  WORLD_SIZE=2\n" in plan for plan in plans] == [True, False]


def test_much_output_arrives_whole(ddl: Ddl) -> None:
    """More than pipes hold, from a rank that ends right after it."""
    done = ddl("run", "-np", "2", "sh", "-c", "seq 100000")
    assert lines_of(done.stdout) == {rank: [str(i) for i in range(1, 100001)] for rank in range(2)}


def test_bytes_that_are_not_utf8_survive(ddl: Ddl) -> None:
    """On the screen and in the files."""
    done = ddl("run", "-np", "1", "--output-dir", "out", "printf", r"\377\376x\n")
    assert done.stdout.encode(errors="surrogateescape") == b"[0] \xff\xfex\n"


def test_files_of_each_rank(ddl: Ddl, tmp_path: Path) -> None:
    """--output-dir writes what each rank wrote, without prefixes, into directories that sort by rank."""
    done = ddl("run", "-np", "11", "--output-dir", "a/b", "sh", "-c", "echo out $RANK; echo err $RANK >&2")
    assert done.returncode == 0
    names = sorted(path.name for path in (tmp_path / "a/b").iterdir())
    assert names == [f"rank.{rank:02d}" for rank in range(11)]
    assert (tmp_path / "a/b/rank.07/stdout").read_text() == "out 7\n"
    assert (tmp_path / "a/b/rank.10/stderr").read_text() == "err 10\n"


def test_timestamps(ddl: Ddl) -> None:
    """--prefix-output-with-timestamp puts the time before the rank."""
    done = ddl("run", "-np", "1", "--prefix-output-with-timestamp", "echo", "x")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} \[0\] x\n", done.stdout)


def test_partial_lines_are_shown_before_they_end(tmp_path: Path) -> None:
    """A prompt or a progress bar is seen while the rank goes on."""
    process = subprocess.Popen(
        [*DDL, "run", "-np", "1", "sh", "-c", "printf 'half way'; read x < fifo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env=environment(None),
    )
    os.mkfifo(tmp_path / "fifo")
    try:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 100) == b"[0] half way"
    finally:
        (tmp_path / "fifo").write_text("go\n")
        rest, _ = process.communicate(timeout=80)
    assert rest == b"\n"


@pytest.mark.parametrize(
    ("script", "code", "how"),
    [("exit 3", 3, "exited with code 3"), ("kill -9 $$", 137, r"killed by signal 9 \(SIGKILL\)")],
)
def test_exit_code_and_summary_are_the_first_failures(script: str, code: int, how: str, ddl: Ddl) -> None:
    """It is named with its host, its end, its last 20 lines and what became of the others."""
    ranks = f"if [ $RANK = 1 ]; then seq 30; {script}; else sleep 0.3; fi"
    done = ddl("run", "-np", "3", "sh", "-c", ranks)
    assert done.returncode == code
    text = "\n".join(said(done))
    assert re.search(rf"rank 1 on {re.escape(socket.gethostname())} failed first: it .*{how}", text)
    assert [line[4:] for line in text.splitlines() if line.startswith("  | ")] == [str(i) for i in range(11, 31)]
    assert "ranks 0, 2: exited with code 0" in text


def test_the_others_get_grace_and_are_then_ended(ddl: Ddl) -> None:
    """SIGTERM after --grace-s; the exit code stays the first one's."""
    script = 'if [ $RANK = 0 ]; then exit 4; fi; trap "echo asked; exit 0" TERM; sleep 300 & wait'
    begun_s = time.monotonic()
    done = ddl("run", "-np", "2", "--grace-s", "0.4", "sh", "-c", script)
    assert 0.4 <= time.monotonic() - begun_s < 100.0
    assert (done.returncode, done.stdout) == (4, "[1] asked\n")
    assert "rank 1: was ended by the launcher" in done.stderr


def test_who_ignores_sigterm_is_killed(ddl: Ddl) -> None:
    """SIGKILL follows."""
    script = 'if [ $RANK = 0 ]; then exit 4; fi; trap "" TERM; while true; do sleep 0.1; done'
    begun_s = time.monotonic()
    done = ddl("run", "-np", "2", "--grace-s", "0", "sh", "-c", script)
    assert done.returncode == 4
    assert time.monotonic() - begun_s < 100.0


@pytest.mark.long
def test_a_child_that_holds_the_pipes_delays_nothing(ddl: Ddl) -> None:
    """Neither the verdict about its parent's death nor the end of the run: it is ended with its parent's group."""
    script = 'if [ $RANK = 1 ]; then sleep 300 & kill -9 $$; fi; trap "" TERM; sleep 300 & wait'
    begun_s = time.monotonic()
    done = ddl("run", "-np", "2", "--grace-s", "0.2", "sh", "-c", script)
    assert done.returncode == 137
    assert time.monotonic() - begun_s < 100.0


def test_a_daemon_that_left_its_group_is_not_waited_for(ddl: Ddl, tmp_path: Path) -> None:
    """It goes on as it asked to, though it holds the pipes; what the rank wrote is all there."""
    begun_s = time.monotonic()
    daemon = 'setsid sh -c "echo \\$\\$ > pid.$RANK; exec sleep 300"'
    script = f"echo before; {daemon} & while [ ! -s pid.$RANK ]; do sleep 0.05; done; echo after"
    done = ddl("run", "-np", "2", "sh", "-c", script)
    assert time.monotonic() - begun_s < 100.0
    assert done.returncode == 0
    assert lines_of(done.stdout) == {rank: ["before", "after"] for rank in range(2)}
    for rank in range(2):
        os.kill(int((tmp_path / f"pid.{rank}").read_text()), signal.SIGKILL)  # raises if it no longer runs


def test_what_ranks_see(ddl: Ddl, tmp_path: Path) -> None:
    """RANK and its kin, TF_CONFIG, the settings given by flag; keys and secrets nowhere."""
    code = "import json, os; json.dump(dict(os.environ), open(os.environ['RANK'], 'w'))"
    done = ddl(
        "run", "-np", "2", "--fusion-bytes", "5", "--verbose", "python", "-c", code, env={"OMP_NUM_THREADS": "3"}
    )
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [(e["RANK"], e["WORLD_SIZE"], e["DDL_RANK"]) for e in seen] == [("0", "2", "0"), ("1", "2", "1")]
    assert json.loads(seen[1]["TF_CONFIG"])["task"]["index"] == 1
    assert (seen[0]["DDL_FUSION_BYTES"], seen[0]["OMP_NUM_THREADS"]) == ("5", "3")
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert "secret" not in f"{seen} {done.stderr} {done.stdout}".lower()


def test_threads_are_said_once(ddl: Ddl) -> None:
    """One line, and it names only what was left open."""
    done = ddl("run", "-np", "2", "true", env={"OMP_NUM_THREADS": "3"})
    told = [line for line in said(done) if "NUM_THREADS" in line]
    assert len(told) == 1
    assert "MKL_NUM_THREADS" in told[0]
    assert "OMP_NUM_THREADS" not in told[0]


@pytest.mark.long
def test_python_is_the_environments_own(ddl: Ddl, tmp_path: Path) -> None:
    """With ddl's environment not on PATH, `python`, a script and -m all run by its interpreter."""
    (tmp_path / "show.py").write_text("import sys; print(sys.prefix)")
    for command in (["python", "show.py"], ["show.py"], ["-m", "show"]):
        done = ddl("run", "-np", "1", *command, env={"PATH": "/usr/bin:/bin"})
        assert done.stdout == f"[0] {sys.prefix}\n", done.stderr


def test_rank_0_reads_stdin(tmp_path: Path) -> None:
    """And the others have none."""
    done = subprocess.run(
        [*DDL, "run", "-np", "2", "cat"],
        input="fed\n",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment(None),
    )
    assert done.stdout == "[0] fed\n"


def test_a_taken_port_is_refused(ddl: Ddl) -> None:
    """A MASTER_PORT that somebody listens at: one line, exit code 2."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = ddl("run", "-np", "2", "true", env={"MASTER_PORT": str(port)})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"port {port} (MASTER_PORT) is taken" in done.stderr


@pytest.mark.parametrize("address", ["node1", "tcp://192.0.2.1:0"])
def test_an_address_that_is_not_ours_is_refused(address: str, ddl: Ddl) -> None:
    """In one line that repeats it."""
    done = ddl("run", "-np", "2", "--control-address", address, "true")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("ddl run: control network: ") and address in line


def test_a_reader_that_goes_ends_no_training(tmp_path: Path) -> None:
    """`ddl run … | head` goes on to the end of the job."""
    (tmp_path / "rank.sh").write_text("for i in 1 2 3; do seq 20000; done; touch done.$RANK\n")
    command = " ".join([*DDL, "run -np 2 sh rank.sh | head -n 1"])
    done = subprocess.run(
        command,
        shell=True,
        capture_output=True,
        timeout=120,
        cwd=tmp_path,
        env=environment(None),
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout in (b"[0] 1\n", b"[1] 1\n")
    deadline_s = time.monotonic() + 40
    while len(list(tmp_path.glob("done.*"))) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_terminal_gets_colours_and_bars(tmp_path: Path) -> None:
    """Each rank's prefix has its colour, and a bar overwrites itself; NO_COLOR is respected."""
    for extra, expected in (
        ({}, b"\x1b[36m[0]\x1b[0m 1%\r\x1b[36m[0]\x1b[0m 2%\r\n"),
        ({"NO_COLOR": "1"}, b"[0] 1%\r[0] 2%\r\n"),
    ):
        reader, terminal = os.openpty()
        done = subprocess.run(
            [*DDL, "run", "-np", "1", "printf", r"\r1%%\r2%%\n"],
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.DEVNULL,
            timeout=120,
            cwd=tmp_path,
            env=environment({"TERM": "xterm", **extra}),
        )
        os.close(terminal)
        assert done.returncode == 0
        assert os.read(reader, 1000) == expected
        os.close(reader)


def test_a_reader_that_stalls_delays_no_verdict(tmp_path: Path) -> None:
    """Nobody reads the launcher's output: a rank that dies is noticed, and the others are ended all the same."""
    script = "if [ $RANK = 0 ]; then echo $$ > pid; exec yes; fi; while [ ! -s pid ]; do sleep 0.05; done; sleep 0.5; kill -9 $$"
    process = subprocess.Popen(
        [*DDL, "run", "-np", "2", "--grace-s", "0.2", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(None),
    )
    deadline_s = time.monotonic() + 60
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text().strip() and not Path(f"/proc/{pid.read_text().strip()}").exists()):
        assert time.monotonic() < deadline_s, "the rank that writes was not ended"
        time.sleep(0.02)
    out, err = process.communicate(timeout=80)
    assert process.returncode == 137
    assert set(out.splitlines()) == {b"[0] y"}
    assert b"rank 1 on" in err
