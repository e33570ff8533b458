"""What a release check complains of in wheels and source distributions, and what it lends a fresh environment."""

from __future__ import annotations

import io
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from tools.release.first_model import LIMIT_S, TARGET_S, example, install_command, verdict
from tools.release.lending import OURS
from tools.release.resolution import TARGETS, requirements
from tools.release.steps import ROOT, Failed, run, walk
from tools.release.wheels import inspect, inspect_source
from tools.release_check import TORCH

METADATA = """Metadata-Version: 2.4
Name: ddl-bird
Version: 1.0
Summary: A bird.
Requires-Python: >=3.10
License-Expression: Apache-2.0
Description-Content-Type: text/markdown
Requires-Dist: ddlcore<1,>=0.1

# ddl-bird
"""
INFO = "ddl_bird-1.0.dist-info"
WHEEL = {
    "ddl_bird/__init__.py": "",
    "ddl_bird/py.typed": "",
    f"{INFO}/METADATA": METADATA,
    f"{INFO}/licenses/LICENSE": "Apache",
}


def wheel_of(folder: Path, **changed: str | None) -> Path:
    """A wheel with these files, by the last part of their names; None: without it."""
    path = folder / "ddl_bird-1.0-py3-none-any.whl"
    files = {name: changed.pop(name.rpartition("/")[2].replace(".", "_"), text) for name, text in WHEEL.items()}
    files |= {name.replace("__", "/"): text for name, text in changed.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            if text is not None:
                archive.writestr(name, text)
    return path


def test_a_good_wheel_passes(tmp_path: Path) -> None:
    """Its files are counted."""
    assert inspect(wheel_of(tmp_path)) == "4 files"


def test_a_package_may_ask_for_the_core_of_its_own_version(tmp_path: Path) -> None:
    metadata = METADATA.replace("ddlcore<1,>=0.1", "ddlcore==1.0")
    assert inspect(wheel_of(tmp_path, METADATA=metadata)) == "4 files"
    with pytest.raises(Failed, match="no requirement ddlcore"):
        inspect(wheel_of(tmp_path, METADATA=metadata.replace("ddlcore==1.0", "ddlcore==0.9")))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"py_typed": None}, "no ddl_bird/py.typed"),
        ({"LICENSE": None}, "no licence"),
        ({"METADATA": METADATA.replace("Summary: A bird.\n", "")}, "no Summary"),
        ({"METADATA": METADATA.replace("# ddl-bird\n", "")}, "no description"),
        ({"METADATA": METADATA.replace("ddlcore<1,>=0.1", "ddlcore")}, "no requirement ddlcore"),
        ({"tests__bird.py": ""}, "outside its package: tests/bird.py"),
        ({"ddl_bird__bird.pyc": ""}, "stray: ddl_bird/bird.pyc"),
        ({"ddl_bird__egg": "x" * (3 << 20)}, "too large: ddl_bird/egg"),
    ],
)
def test_what_is_wrong_with_a_wheel(changed: dict[str, str | None], words: str, tmp_path: Path) -> None:
    """In one line, with its name."""
    with pytest.raises(Failed, match=rf"ddl_bird-1.0-py3-none-any.whl: .*{words}"):
        inspect(wheel_of(tmp_path, **changed))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("LICENSE README.md pyproject.toml PKG-INFO tests/test_bird.py src/ddl_bird/__init__.py", ""),
        ("README.md pyproject.toml PKG-INFO tests/test_bird.py", "no LICENSE"),
        ("LICENSE README.md pyproject.toml PKG-INFO", "no tests"),
        ("LICENSE README.md pyproject.toml PKG-INFO tests/test_bird.py .venv/bin/x", "stray: .venv/bin/x"),
    ],
)
def test_source_distributions(files: str, words: str, tmp_path: Path) -> None:
    """They bring licence, README and tests, and nothing that was left behind."""
    path = tmp_path / "ddl_bird-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in files.split():
            archive.addfile(tarfile.TarInfo(f"ddl_bird-1.0/{name}"), io.BytesIO())
    if words:
        with pytest.raises(Failed, match=words):
            inspect_source(path)
    else:
        inspect_source(path)


def test_nothing_of_ours_is_lent() -> None:
    """Neither what is installed of the source tree nor the paths to it; frameworks are."""
    ours = "ddlcore-0.1.0.dist-info _editable_impl_ddl_tf.pth __editable__.ddlcore-0.1.0.pth _ddl_mxnet_numpy.py ddl_mxnet.pth"
    assert [name for name in ours.split() if not OURS.fullmatch(name)] == []
    assert [name for name in ("numpy", "tensorflow", "mxnet", "distutils-precedence.pth") if OURS.fullmatch(name)] == []


README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_first_commands_are_those_of_the_readme() -> None:
    """What installs ddl from a clone, and the example with what it prints."""
    assert install_command(README)[:4] == ["pip", "install", ".", "./plugins/ddl_shm"]
    found = example(README)
    assert found.command == "ddl run -np 2 python train.py"
    assert found.printed == tuple(f"[{rank}] rank {rank} of 2 learned y = 3.0 x" for rank in (0, 1))
    compile(found.script, "train.py", "exec")
    found.check("ddl run: OMP_NUM_THREADS=1\n" + "\n".join(reversed(found.printed)))
    with pytest.raises(Failed, match="README's example printed"):
        found.check(found.printed[0])
    with pytest.raises(Failed, match="README has no line"):
        install_command("pip install ddlcore")


def test_the_time_to_a_first_model() -> None:
    """It is printed with its parts; above the target it is a warning, and only far above a failure."""
    assert verdict({"venv": 2.0, "pip install": 61.4}) == "63 s (venv 2 s, pip install 61 s), target 150 s"
    assert "WARNING: the target is 150 s" in verdict({"pip install": TARGET_S + 1})
    with pytest.raises(Failed, match="more than 900 s"):
        verdict({"pip install": LIMIT_S + 1})


def test_what_each_environment_requires_is_read_from_the_makefile() -> None:
    """The arguments of the recipe itself: pinned, with the packages of this tree."""
    recipe = "echo made\npython3 tools/environment.py .venv --constraint c.txt 'a[b,c]' -e d\n"
    assert requirements(recipe) == ["--constraint", "c.txt", "a[b,c]", "-e", "d"]
    for target in TARGETS.values():
        wanted = requirements(run(["make", "--dry-run", "--always-make", target], ROOT))
        assert wanted[:2] == ["--constraint", "constraints.txt"]
        assert TORCH in wanted and "plugins/ddl_torch" in wanted
    with pytest.raises(Failed, match="no line of the recipe installs anything"):
        requirements("python3 -m venv .venv\n")


def test_lanes_run_side_by_side_and_stages_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Two lanes wait for each other here; the stage after them begins when both are done."""
    both, done = threading.Barrier(2), []

    def meet() -> str:
        both.wait(60)
        done.append("met")
        return "met"

    def last() -> str:
        return f"after {len(done)}"

    assert walk([[[("left", meet)], [("right", meet)]], [[("last", last)]]]) == 0
    assert "ok      last: after 2" in capsys.readouterr().out


def test_no_step_begins_after_one_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in its lane nor in a later stage, and the exit code says it."""

    def fail() -> str:
        raise Failed("no wheel")

    assert walk([[[("first", fail), ("second", str)]], [[("third", str)]]]) == 1
    assert capsys.readouterr().out == "FAILED  first: no wheel\n"
    with pytest.raises(ZeroDivisionError):  # an error of the check itself is not hidden
        walk([[[("wrong", lambda: str(1 // 0))]]])
