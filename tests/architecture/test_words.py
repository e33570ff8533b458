"""What the source may not name: surroundings in the runtime, plugins in the core, this machine anywhere."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, Source, core, every

SURROUNDINGS = re.compile(r"\b(pluggy|environ|getenv|torch|tensorflow|keras|mxnet|jax)\b", re.IGNORECASE)
PLUGINS = re.compile(r"(?<![a-z0-9])(nccl|gloo|mpi|mpi4py|torch|tensorflow|keras|mxnet)(?![a-z])", re.IGNORECASE)
ENVIRON = re.compile(r"\bos\.(environ|getenv|putenv)\b")

NAMES_PLUGINS = {  # file below ddlcore: the one reason
    "plug/aliases.py": "the one table of names of plugins and frameworks",
    "builtin/checks/known.py": "the versions that are known to be bad, of whatever `ddl doctor` may meet",
    "builtin/clusters.py": "the variables of other launchers, whose names they chose",
    "builtin/slurm.py": "a flag of srun's, whose name it chose",
    "launch/horovod.py": "the flags and variables that horovodrun has, and what each becomes",
}
READS_ENVIRONMENT = {
    "ddlcore/config.py": "the one reader of DDL_* variables",
    "ddlcore/contracts/cache.py": "finds the user's cache directory by XDG_CACHE_HOME, before there is a job that has settings",
}


@pytest.mark.parametrize("source", [s for s in core() if s.module.startswith("ddlcore.runtime")], ids=str)
def test_the_runtime_knows_no_surroundings(source: Source) -> None:
    """Nothing under runtime/ names pluggy, the environment or a framework, not even in a comment."""
    hits = [
        f"{source}:{n} {line.strip()}"
        for n, line in enumerate(source.text.splitlines(), 1)
        if SURROUNDINGS.search(line)
    ]
    assert hits == []


def test_the_core_names_no_plugin() -> None:
    """A transport of a plugin, or a framework, stands in the table of aliases only: not even a comment names one.

    Templates included. The other exceptions speak of what others have named so: variables, flags.
    """
    folder = ROOT / "ddlcore"
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".tmpl")]
    hits = [
        f"{name}:{number} {line.strip()}"
        for path in files
        if (name := str(path.relative_to(folder))) not in NAMES_PLUGINS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PLUGINS.search(line)
    ]
    assert len(files) > 100
    assert hits == []


@pytest.mark.parametrize("source", every(), ids=str)
def test_the_environment_is_read_in_one_file(source: Source) -> None:
    """Others may hand os.environ on, whole, as an argument; what is in it is read where the table of settings is.

    The launcher, which makes the environment of other processes, is excepted.
    """
    if str(source) in READS_ENVIRONMENT or source.module.startswith("ddlcore.launch"):
        return
    handed_on = {id(argument) for node in source.nodes if isinstance(node, ast.Call) for argument in node.args}
    hits = [
        f"{source}:{node.lineno} {node.value.id}.{node.attr}"
        for node in source.nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and ENVIRON.fullmatch(f"{node.value.id}.{node.attr}")
        and id(node) not in handed_on
    ]
    assert hits == []


def test_the_exceptions_are_needed() -> None:
    """An exception whose file is gone, or no longer needs it, goes too."""
    for name in NAMES_PLUGINS:
        assert PLUGINS.search((ROOT / "ddlcore" / name).read_text())
    for name in READS_ENVIRONMENT:
        assert ENVIRON.search((ROOT / name).read_text())


def test_no_file_names_this_machine() -> None:
    """What is committed holds on any machine: no path of this checkout, none below the home of who runs this."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [f"{Path.home()}/".encode(), f"{ROOT}/".encode()]
    files = [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    assert [str(path) for path in files if any(word in path.read_bytes() for word in paths)] == []


def test_no_text_is_asked_whether_it_is_of_digits() -> None:
    """`"²".isdigit()` is true, and int("²") raises: isdecimal is what int takes."""
    assert [str(source) for source in every() if ".isdigit(" in source.text and source.path != Path(__file__)] == []
