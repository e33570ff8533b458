"""Builds wheels of everything, installs them in fresh environments, and uses them as the documentation says.

    python tools/release_check.py [--folder KEEP]

A fresh environment has no GPU, no editable install and no source tree, so that files missing from a wheel are noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.demo import LEAST_ACCURACY, objection
from tools.environment import of_pip
from tools.release.first_model import example, first_model
from tools.release.lending import lend, origin
from tools.release.resolution import resolve
from tools.release.steps import ROOT, Failed, Lane, run, walk
from tools.release.uv_project import uv_project
from tools.release.wheels import build, inspect, outside, sources

UV = Path(sys.executable).with_name("uv")
TORCH = "torch==2.13.0"
# Distributions of examples/plugins that share one environment, with the name and kind of their plugin.
OUTSIDE = {
    "ddl-zmq": ("zmq", "transport"),
    "ddl-int8": ("int8", "compressor"),
    "ddl-bysize": ("bysize", "fusion"),
    "ddl-randomsearch": ("randomsearch", "tuner"),
}
# The methods that a package just made by `ddl plugins new` leaves to be written, in the order of its files.
BEGUN = {
    "transport": "open close abort allreduce allgatherv broadcast",
    "adapter": "buffer allocate adopt copy make to_numpy",
    "fusion": "arrange",
    "tuner": "ask tell",
    "compressor": "wire_dtype encode decode",
    "launcher": "commands",
}
# Plugins whose frameworks this environment lends, if it has them, with their modules.
LENT = {
    distribution: module
    for distribution, module, framework in (
        ("ddl-tf", "ddl_tf", "tensorflow"),
        ("ddl-mxnet", "ddl_mxnet", "mxnet"),
        ("ddl-mpi", "ddl_mpi", "mpi4py"),
    )
    if importlib.util.find_spec(framework) is not None
}


class Environment:
    """A fresh environment in ``folder``, with an empty working directory beside it."""

    def __init__(self, folder: Path, wheels: Path, pinned: bool = True) -> None:
        self.folder = folder
        self.pinned = pinned
        self.wheels = wheels
        self.bin = folder / "bin"
        self.work = folder.with_name(f"{folder.name}-work")

    def create(self) -> None:
        """Create the environment, with nothing installed in it."""
        run([UV, "venv", "--quiet", "--python", sys.executable, self.folder], ROOT)
        self.work.mkdir(exist_ok=True)

    def make(self, *what: str) -> str:
        """Create the environment and install ``what``: our packages from the wheels, the others as pinned."""
        self.create()
        return self.install(*what)

    def install(self, *what: str) -> str:
        uv: list[str | Path] = [UV, "pip", "install", "--quiet", "--python", self.bin / "python"]
        if self.pinned:
            uv += ["--constraint", ROOT / "constraints.txt"]
        like_pip = of_pip(Path(sys.executable))
        # The option --find-links would replace the variable, so the variable names both folders.
        theirs = like_pip.get("UV_FIND_LINKS") or os.environ.get("UV_FIND_LINKS")
        links = ",".join(filter(None, (str(self.wheels), theirs)))
        run([*uv, *what], self.work, environ=like_pip | {"UV_FIND_LINKS": links})
        return " ".join(what)

    def ddl(self, *arguments: str, expect: int = 0, limit_s: float = 300.0) -> str:
        """Run ``ddl`` in this environment and return what it prints."""
        return run([self.bin / "ddl", *arguments], self.work, path=self.bin, expect=expect, limit_s=limit_s)

    def horovodrun(self, *arguments: str) -> str:
        """Run ``horovodrun`` in this environment and return what it prints."""
        return run([self.bin / "horovodrun", *arguments], self.work, path=self.bin, limit_s=300.0)


def info(env: Environment) -> str:
    """Check that `ddl info` lists what is installed, and says why NCCL cannot be used on a machine without a GPU."""
    shown = env.ddl("info")
    line = next((line for line in shown.splitlines() if re.match(r"\s*nccl\s", line)), "")
    if not re.search(r"not usable|ready", line):
        raise Failed(f"`ddl info` says nothing of nccl:\n{shown}")
    return " ".join(line.split())[:160]


def readme(env: Environment) -> str:
    """Check that README's first example prints the lines below it."""
    shown = example((ROOT / "README.md").read_text(encoding="utf-8"))
    (env.work / "train.py").write_text(shown.script)
    shown.check(env.ddl(*shown.command.removeprefix("ddl ").split()))
    return shown.command


def digits(env: Environment, script: str) -> str:
    """Check that two ranks learn the digits over shared memory, and end with the same parameters."""
    shutil.copy(ROOT / "examples" / script, env.work)
    shown = env.ddl("run", "-np", "2", "python", script)
    wrong = objection(shown)
    if wrong:
        raise Failed(f"{wrong}\n{shown}")
    return next(line for line in shown.splitlines() if "test accuracy" in line)


def unchanged(env: Environment, script: str) -> str:
    """Check that a script that is written for Horovod trains on two ranks."""
    shutil.copy(ROOT / "plugins/ddl_horovod/tests/programs" / script, env.work)
    shown = env.horovodrun("-np", "2", "-H", "localhost:2", "python", script)
    if "[0] learned" not in shown.splitlines():
        raise Failed(f"{script} did not learn:\n{shown}")
    return "learned"


def conform(env: Environment, name: str, kind: str = "transport") -> str:
    """Return the last line of `ddl conform`."""
    return env.ddl("conform", name, "--kind", kind, limit_s=600.0).strip().splitlines()[-1]


def new_plugins(env: Environment) -> str:
    """Check that new plugins install, and that `ddl conform` lists exactly the methods that are still to be written."""
    names = {kind: "mine" if kind == "transport" else f"mine-{kind}" for kind in BEGUN}
    for kind, name in names.items():
        env.ddl("plugins", "new", kind, name)
    env.install(*(f"./ddl-{name}" for name in names.values()))
    for kind, name in names.items():
        shown = env.ddl("conform", name, expect=1)
        listed = re.findall(r"^    \w+\.(\w+)  \(", shown.partition("still to be written\n")[2], re.MULTILINE)
        if listed != BEGUN[kind].split():
            raise Failed(f"`ddl conform {name}` lists {', '.join(listed)}, not {BEGUN[kind]}:\n{shown}")
    return f"{', '.join(BEGUN)} install; conform exits 1 and lists their methods"


def lent(env: Environment) -> str:
    """Check that plugins install beside frameworks that were there before, and are imported from their wheels."""
    env.create()
    lend(env.folder, env.folder.with_name("lent"))
    env.install("ddl-conform", "ddl-horovod", *LENT)
    modules = ("ddlcore", "horovod", *LENT.values())
    return ", ".join(origin(env.bin / "python", module, env.folder) for module in modules)


def offered(env: Environment) -> str:
    """Check that `ddl plugins` finds all of them usable, and reports no problem."""
    told = json.loads(env.ddl("plugins", "--json"))
    rows = {row["distribution"]: row["state"] for row in told["plugins"] if row["distribution"] in LENT}
    if told["problems"] or rows != dict.fromkeys(LENT, "ready"):
        raise Failed(f"`ddl plugins` tells {rows}, and {told['problems']}")
    return f"{', '.join(rows)} are ready"


def outside_training(env: Environment, script: str, *flags: str, options: tuple[str, ...] = ()) -> str:
    """Check that a plugin from outside the tree trains the digits to 95 %."""
    for name in {script, "digits.py"}:  # all scripts take the data from digits.py
        shutil.copy(ROOT / "examples/plugins" / name, env.work)
    shown = env.ddl("run", "-np", "2", *flags, "python", script, *options)
    accuracy = re.search(r"test accuracy ([\d.]+) %(.*)", shown)
    if accuracy is None or float(accuracy[1]) < LEAST_ACCURACY:
        raise Failed(f"{script} {' '.join((*flags, *options))} did not learn:\n{shown}")
    return " ".join(accuracy[0].split())


def bench(env: Environment) -> str:
    """Check that a command of a tool package runs, and return the last line of its table."""
    shown = env.ddl("bench", "-np", "2", "--ops", "allreduce", "--sizes", "4", "--rounds", "3")
    return " ".join(next(line for line in shown.splitlines() if "allreduce" in line).split())


def live_page(env: Environment) -> str:
    """Check that the live page of a job is served, and return its address."""
    shown = env.ddl("run", "-np", "2", "--dashboard", "true")
    found = re.search(r"live page: http://127\.0\.0\.1:\d+/", shown)
    if found is None:
        raise Failed(f"`ddl run --dashboard` says:\n{shown}")
    return found[0]


def absent(env: Environment) -> str:
    """Check that `ddl` says how to install the package of a command, or of an option, that is not there."""
    run = ("run", "-np", "2")
    known = (
        (("doctor",), "ddl.doctor"),
        ((*run, "--timeline", "t.json", "true"), "ddl.doctor"),
        ((*run, "--dashboard", "true"), "ddl.dashboard"),
        ((*run, "--top", "true"), "ddl.dashboard"),
        ((*run, "--metrics-port", "9400", "true"), "ddl.prometheus"),
    )
    for words, package in known:
        shown = env.ddl(*words, expect=2).strip()
        if not re.search(rf"install it: pip install .*{package}", shown):
            raise Failed(f"`ddl {' '.join(words)}` says:\n{shown}")
    return shown[:160]


def stages(folder: Path) -> list[list[Lane]]:
    """Return all steps: the lanes of a stage run side by side, and each step of a lane needs those before it."""
    wheels = folder / "dist"
    wheels.mkdir(parents=True, exist_ok=True)
    resolution: Lane = [("versions of PyPI alone", partial(resolve, UV, folder / "resolution"))]
    made: Lane = [
        ("build", partial(build, [*sources(), *outside()], wheels)),
        ("wheels", partial(_inspect_all, wheels)),
    ]
    others: Lane = [("from an empty environment to a trained model", partial(first_model, folder / "first"))]
    others += [("a project of uv", partial(uv_project, UV, folder / "project"))]
    others += with_jax(Environment(folder / "jax", wheels, pinned=False))  # its releases need a newer numpy
    if LENT:
        others += with_frameworks(Environment(folder / "frameworks", wheels))
    return [[resolution, made], [with_torch(Environment(folder / "torch", wheels)), others]]


def with_torch(env: Environment) -> Lane:
    """Return the steps of the environment with PyTorch, and with the plugins that others have written."""
    train = partial(outside_training, env, "digits.py")
    packages = (
        TORCH,
        "scikit-learn",
        "ddl-conform",
        "ddl-dashboard",
        "ddl-doctor",
        "ddl-horovod",
        "ddl-prometheus",
        "ddl-torch",
        "ddl-gloo",
        "ddl-nccl",
    )
    return [
        ("fresh environment", partial(env.make, *packages)),
        ("ddl info", partial(info, env)),
        ("README", partial(readme, env)),
        ("digits with PyTorch", partial(digits, env, "torch_digits.py")),
        ("Horovod with PyTorch", partial(unchanged, env, "torch_script.py")),
        ("ddl bench", partial(bench, env)),
        ("ddl run --dashboard", partial(live_page, env)),
        ("conform shm", partial(conform, env, "shm")),
        ("plugins that are begun", partial(new_plugins, env)),
        ("plugins from outside", partial(env.install, *OUTSIDE)),
        *((f"conform {name}", partial(conform, env, name, kind)) for name, kind in OUTSIDE.values()),
        ("train on zmq", partial(train, "--backend", "zmq")),
        ("train by int8", partial(train, options=("--compression", "int8"))),
        ("train by bysize", partial(train, "--fusion-policy", "bysize")),
        ("train and tune by randomsearch", partial(train, "--autotune", "--tuner", "randomsearch")),
    ]


def with_jax(env: Environment) -> Lane:
    """Return the steps of the environment with JAX."""
    return [
        ("fresh environment for JAX", partial(env.make, "ddl-conform", "ddl-jax", "scikit-learn")),
        ("tool packages that are not there", partial(absent, env)),
        ("conform jax", partial(conform, env, "jax", "adapter")),
        ("train with JAX", partial(outside_training, env, "jax_digits.py")),
    ]


def with_frameworks(env: Environment) -> Lane:
    """Return the steps of the environment that the one of this process lends its frameworks."""
    scripts = {"ddl-tf": ("TensorFlow", "tf2_digits.py"), "ddl-mxnet": ("MXNet", "mxnet_digits.py")}
    theirs = {"keras_script.py": "ddl-tf", "tf1_script.py": "ddl-tf", "mxnet_script.py": "ddl-mxnet"}
    return [
        ("fresh environment for other frameworks", partial(lent, env)),
        ("ddl plugins", partial(offered, env)),
        *(
            (f"digits with {framework}", partial(digits, env, script))
            for plugin, (framework, script) in scripts.items()
            if plugin in LENT
        ),
        *((f"Horovod: {script}", partial(unchanged, env, script)) for script, needs in theirs.items() if needs in LENT),
    ]


def _inspect_all(wheels: Path) -> str:
    return ", ".join(f"{wheel.name.split('-')[0]} {inspect(wheel)}" for wheel in sorted(wheels.glob("*.whl")))


def main() -> int:
    """Run the check and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="where wheels and environments are made, and kept; default: gone after"
    )
    given: Path | None = parser.parse_args().folder
    with contextlib.ExitStack() as stack:
        folder = given or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddl-release-")))
        return walk(stages(folder.resolve()))


if __name__ == "__main__":
    sys.exit(main())
