"""Builds wheels of everything, installs them in fresh environments, and uses them as the documentation says.

    python tools/release_check.py [--folder KEEP]

A fresh environment has no GPU here, no editable install and no source tree: what is missing in a wheel is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.demo import LEAST_ACCURACY, objection
from tools.release.steps import ROOT, Failed, run, walk
from tools.release.wheels import build, inspect, outside, sources

TORCH = "torch==2.13.0"
# Distributions of examples/plugins that share one environment, with the name and the door of what they bring.
OUTSIDE = {
    "ddl-zmq": ("zmq", "transport"),
    "ddl-int8": ("int8", "compressor"),
    "ddl-bysize": ("bysize", "fusion"),
    "ddl-randomsearch": ("randomsearch", "tuner"),
}


class Environment:
    """A fresh one, in ``folder``, with an empty working directory beside it."""

    def __init__(self, folder: Path, wheels: Path, pinned: bool = True) -> None:
        self.folder = folder
        self.pinned = pinned
        self.wheels = wheels
        self.bin = folder / "bin"
        self.work = folder.with_name(f"{folder.name}-work")

    def make(self, *what: str) -> str:
        """Installs ``what``: ours from the wheels, the rest as pinned."""
        run([sys.executable, "-m", "venv", self.folder], ROOT)
        self.work.mkdir(exist_ok=True)
        self.install(*what)
        return " ".join(what)

    def install(self, *what: str) -> str:
        pip: list[str | Path] = [self.bin / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        if self.pinned:
            pip += ["--constraint", ROOT / "constraints.txt"]
        run([*pip, "--find-links", self.wheels, *what], self.work)
        return " ".join(what)

    def ddl(self, *arguments: str, expect: int = 0, limit_s: float = 300.0) -> str:
        """What ``ddl`` prints here."""
        return run([self.bin / "ddl", *arguments], self.work, path=self.bin, expect=expect, limit_s=limit_s)


def info(env: Environment) -> str:
    """`ddl info` lists what is installed, and says why NCCL cannot be used on a machine without a GPU."""
    shown = env.ddl("info")
    line = next((line for line in shown.splitlines() if re.match(r"\s*nccl\s", line)), "")
    if not re.search(r"not usable|ready", line):
        raise Failed(f"`ddl info` says nothing of nccl:\n{shown}")
    return " ".join(line.split())[:160]


def readme(env: Environment) -> str:
    """README's first example prints the lines beneath it."""
    block = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    command, _, shown = block.partition("# $ ddl ")[2].partition("\n")
    (env.work / "train.py").write_text(block)
    printed = env.ddl(*command.split()).splitlines()
    wanted = [line[2:] for line in shown.splitlines()]
    if sorted(line for line in printed if line.startswith("[")) != sorted(wanted):
        raise Failed(f"README's example printed {printed}, not {wanted}")
    return command


def digits(env: Environment, *flags: str) -> str:
    """The digits are learned on shared memory, to the same parameters on both ranks."""
    shutil.copy(ROOT / "examples/torch_digits.py", env.work)
    shown = env.ddl("run", "-np", "2", *flags, "python", "torch_digits.py")
    wrong = objection(shown)
    if wrong:
        raise Failed(f"{wrong}\n{shown}")
    return next(line for line in shown.splitlines() if "test accuracy" in line)


def conform(env: Environment, name: str, door: str = "transport") -> str:
    """What `ddl conform` finds, in its last line."""
    return env.ddl("conform", name, "--door", door, limit_s=600.0).strip().splitlines()[-1]


def new_plugin(env: Environment) -> str:
    """A plugin that was just begun installs, and `ddl conform` lists what is still to be written."""
    env.ddl("plugins", "new", "transport", "mine")
    env.install("./ddl-mine")
    shown = env.ddl("conform", "mine", expect=1)
    missing = [name for name in ("open", "close", "allreduce", "allgatherv", "broadcast") if name not in shown]
    if missing:
        raise Failed(f"`ddl conform mine` does not list {', '.join(missing)}:\n{shown}")
    return "ddl-mine installs; conform exits 1 and lists its methods"


def outside_training(env: Environment, script: str, *flags: str, options: tuple[str, ...] = ()) -> str:
    """A plugin from outside the tree trains the digits to 95 %."""
    for name in {script, "digits.py"}:  # which all take the data from
        shutil.copy(ROOT / "examples/plugins" / name, env.work)
    shown = env.ddl("run", "-np", "2", *flags, "python", script, *options)
    accuracy = re.search(r"test accuracy ([\d.]+) %(.*)", shown)
    if accuracy is None or float(accuracy[1]) < LEAST_ACCURACY:
        raise Failed(f"{script} {' '.join((*flags, *options))} did not learn:\n{shown}")
    return " ".join(accuracy[0].split())


def steps(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """All of them, in order."""
    wheels = folder / "dist"
    wheels.mkdir(parents=True, exist_ok=True)
    for source in (*sources(), *outside()):
        yield f"build {source.relative_to(ROOT) if source != ROOT else 'ddlcore'}", partial(build, source, wheels)
    yield "wheels", partial(_inspect_all, wheels)
    env = Environment(folder / "torch", wheels)
    packages = [TORCH, "scikit-learn", "ddlcore[testing]", "ddl-torch", "ddl-gloo", "ddl-nccl"]
    yield "fresh environment", partial(env.make, *packages)
    yield "ddl info", partial(info, env)
    yield "README", partial(readme, env)
    yield "digits on shm", partial(digits, env)
    yield "conform shm", partial(conform, env, "shm")
    yield "a plugin that is begun", partial(new_plugin, env)
    yield "plugins from outside", partial(env.install, *OUTSIDE)
    for name, door in OUTSIDE.values():
        yield f"conform {name}", partial(conform, env, name, door)
    train = partial(outside_training, env, "digits.py")
    yield "train on zmq", partial(train, "--backend", "zmq")
    yield "train by int8", partial(train, options=("--compression", "int8"))
    yield "train by bysize", partial(train, "--fusion-policy", "bysize")
    yield "train and tune by randomsearch", partial(train, "--autotune", "--tuner", "randomsearch")
    jax = Environment(folder / "jax", wheels, pinned=False)  # its releases want a newer numpy than we pin
    yield "fresh environment for JAX", partial(jax.make, "ddlcore[testing]", "ddl-jax", "scikit-learn")
    yield "conform jax", partial(conform, jax, "jax", "adapter")
    yield "train with JAX", partial(outside_training, jax, "jax_digits.py")


def _inspect_all(wheels: Path) -> str:
    return ", ".join(f"{wheel.name.split('-')[0]} {inspect(wheel)}" for wheel in sorted(wheels.glob("*.whl")))


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="where wheels and environments are made, and kept; default: gone after"
    )
    given: Path | None = parser.parse_args().folder
    with contextlib.ExitStack() as stack:
        folder = given or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddl-release-")))
        return walk(list(steps(folder.resolve())))


if __name__ == "__main__":
    sys.exit(main())
