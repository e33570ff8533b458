"""The examples of docs/torch-backend.md: what users of torch.distributed run, only with another backend's name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from plugins.ddl_torch.tests.launching import EXAMPLES, PROGRAMS, launch
from tests.docs.blocks import blocks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

FOLDER = EXAMPLES / "torch_backend"
PAGE = "docs/torch-backend.md"


@dataclass(frozen=True)
class Example:
    """A program of the folder, its arguments, and how many ranks it needs."""

    name: str
    args: tuple[str, ...] = ()
    size: int = 2

    def __str__(self) -> str:
        return " ".join((self.name, *self.args))

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"


DDP = Example("ddp")
SAME = [Example("fsdp1"), Example("fsdp2"), Example("zero"), Example("compiled")]
LIBRARIES = {"with_lightning": "lightning", "with_accelerate": "accelerate", "with_trainer": "transformers"}
LEARN = [
    DDP,
    *SAME,
    Example("ddp_hooks"),
    Example("fsdp2", ("--replicas", "2"), 4),
    Example("tensor_parallel", size=4),
    *map(Example, LIBRARIES),
    Example("with_deepspeed", ("--stage", "1")),
    Example("with_deepspeed"),
]


def need(example: Example) -> None:
    """Skip the test if what the program imports is not installed."""
    library = {**LIBRARIES, "with_deepspeed": "deepspeed"}.get(example.name)
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library}")


def facts(shown: str, size: int) -> tuple[float, str]:
    """Return the test accuracy in %, and the digest of the parameters, which must be the same on all ranks."""
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", shown)
    digests = re.findall(rf"rank \d of {size}: parameters (\w{{12}})", shown)
    assert len(digests) == size and len(set(digests)) == 1, shown
    assert "what next" not in shown, shown  # no warning of ddl's own
    return float(accuracy), digests[0]


def run(example: Example, *more: str) -> tuple[float, str]:
    return facts(launch(example.size, example.path, *example.args, *more), example.size)


def torchrun(program: Path, *args: str, size: int = 2, options: tuple[str, ...] = ()) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *options]
    done = subprocess.run(
        [*command, str(program), *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("example", LEARN, ids=str)
def test_it_learns(example: Example) -> None:
    """95 % of the images at least, and the same parameters to the last bit under torchrun."""
    need(example)
    accuracy, digest = run(example)
    assert accuracy >= 95.0
    shown = torchrun(example.path, *example.args, size=example.size)
    assert facts(shown, example.size) == (accuracy, digest)


@pytest.mark.soak
@pytest.mark.parametrize("example", LEARN, ids=str)
def test_it_learns_what_it_learns_on_gloo(example: Example) -> None:
    """To the last bit, because every sum is of two numbers.

    What only divides a model or an optimizer among ranks computes what DistributedDataParallel computes.
    """
    need(example)
    assert run(example) == run(DDP if example in SAME else example, "--backend", "gloo")


@pytest.mark.long
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    args = ("--checkpoint", str(tmp_path / "saved"), "--epochs")
    begun, _ = run(Example("fsdp2", (*args, "2")))
    ended, _ = run(Example("fsdp2", ("--replicas", "2", *args, "4"), 4))
    assert begun < 95.0 <= ended


@pytest.mark.long
def test_torchrun_starts_the_ranks_again() -> None:
    """Gloo cannot: it believes the keys of the first attempt, which torchrun's store still has."""
    shown = torchrun(PROGRAMS / "restarted.py", options=("--max-restarts", "1"))
    assert all(f"rank {rank}: attempt 1 has ended" in shown for rank in range(2)), shown


@pytest.mark.long
def test_the_compiler_that_makes_machine_code() -> None:
    if not any(Path(folder, "g++").exists() for folder in os.get_exec_path()):
        pytest.skip("inductor needs a C++ compiler, and there is no g++")
    accuracy, _ = run(Example("compiled", ("--compiler", "inductor")))
    assert accuracy >= 95.0


@pytest.mark.long
def test_an_elastic_training_goes_on_without_a_killed_rank(tmp_path: Path) -> None:
    """DistributedDataParallel is made anew in each world; the process that replaces the killed one joins."""
    args = (str(tmp_path / "killed"), str(FOLDER / "elastic_ddp.py"))
    shown = launch(3, PROGRAMS / "killed.py", *args, options=["--min-np", "2"])
    assert "rank 1 died (SIGKILL); 2 ranks go on" in shown, shown
    (size,) = set(re.findall(r"rank \d of (\d): parameters", shown))
    accuracy, _ = facts(shown, int(size))
    assert accuracy >= 95.0


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_replicas_of_torchft_go_on_without_a_killed_one(lost: int, tmp_path: Path) -> None:
    """The next step comes within 2 s, and whoever takes the place of the killed one joins."""
    if importlib.util.find_spec("torchft") is None or not hasattr(dist, "_reconfigure"):
        pytest.skip("torchft is not installed, or torch is older than 2.14: pip install torchft-nightly")
    from torchft.coordination import LighthouseServer

    house = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=500)
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": house.address(), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(FOLDER / "with_torchft.py"),
        "--steps",
        "2000",
        "--replica",
    ]  # still at it when one joins
    shown = [tmp_path / str(replica) for replica in range(3)]

    def start(replica: int) -> subprocess.Popen[bytes]:
        with open(shown[replica], "wb") as file:
            return subprocess.Popen([*command, str(replica)], env=env, stdout=file, stderr=subprocess.STDOUT)

    def wait_for(replica: int, words: str, timeout_s: float = 200.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while words not in (text := shown[replica].read_text()):
            assert time.monotonic() < deadline_s, text
            time.sleep(0.01)

    running = [start(replica) for replica in range(3)]
    try:
        wait_for(lost, "step 100: ")
        running[lost].kill()
        since_s = time.monotonic()
        wait_for(2, "step 102: ")  # 101 may be there already
        assert time.monotonic() - since_s < 2.0 * float(os.environ.get("DDL_TEST_PATIENCE", "1"))
        running[lost].wait(20)
        running[lost] = start(lost)
        assert [process.wait(200) for process in running] == [0, 0, 0]
    finally:
        for process in running:
            process.kill()
            process.wait(20)
        house.shutdown()
    text = "".join(file.read_text() for file in shown)
    (size,) = set(re.findall(r"rank \d of (\d): parameters", text))
    accuracy, _ = facts(text, int(size))
    assert accuracy >= 95.0


def test_the_page_shows_lines_of_the_examples() -> None:
    """Each block of Python that names a file of the folder consists of lines of that file, in their order."""
    shown = [block for block in blocks(PAGE) if block.code.startswith("# examples/torch_backend/")]
    assert {block.code.split()[1] for block in shown} == {
        f"examples/torch_backend/{path.name}" for path in FOLDER.glob("*.py") if path.name != "learning.py"
    }
    for block in shown:
        first, *lines = block.code.strip().splitlines()
        there = iter([line.strip() for line in (FOLDER.parents[1] / first.split()[1]).read_text().splitlines()])
        missing = [line for line in lines if line.strip() not in there]
        assert not missing, f"{block}: {missing} are not lines of {first}, in this order"


@pytest.mark.long
@pytest.mark.parametrize("example", LEARN, ids=str)
def test_a_killed_rank_is_named_on_the_others(example: Example, tmp_path: Path) -> None:
    """Within 2 s, whatever the ranks wait for."""
    need(example)
    args = (str(tmp_path / "killed"), str(example.path), *example.args)
    shown = launch(example.size, PROGRAMS / "killed.py", *args, check=False)
    told = re.findall(r"rank (\d) raised after ([\d.]+) s: .*rank 1 lost", shown)
    assert [rank for rank, _ in sorted(told)] == [str(rank) for rank in range(example.size) if rank != 1], shown
    assert all(float(seconds) < 2.0 for _, seconds in told), shown
