"""What a shell completes: asked as click asks for a shell, and once by a shell's own variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import CompletionItem, ShellComplete

from ddlcore.commands.cli import _ddl
from ddlcore.config.table import SETTINGS
from tests.launch.starting import Ddl
from tests.plug.conftest import Site, site

__all__ = ["site"]

PLUGIN = """
@hookimpl
def ddl_transports():
    return [
        TransportProvider('pigeon', 'coop:Pigeon', doc='by air', sizes=(2, None)),
        TransportProvider('owl', 'coop:Owl', devices=('cpu', 'moon')),
    ]
@hookimpl
def ddl_tuners():
    return [TunerProvider('wise', 'coop:Wise', settings=(Setting('pigeon_loft', str, '', 'where it lives'),))]
"""


def items(*words: str) -> list[CompletionItem[str]]:
    """The completions of the last word."""
    shell = ShellComplete(_ddl, {}, "ddl", "_DDL_COMPLETE")
    return shell.get_completions(list(words[:-1]), words[-1])


def completed(*words: str) -> list[str]:
    """The same as plain words: nothing is left to the shell."""
    found = items(*words)
    assert {one.type for one in found} <= {"plain"}
    return [one.value for one in found]


def left_to_shell(*words: str) -> str:
    """The kind of path that the shell itself completes."""
    (one,) = items(*words)
    return str(one.type)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present directory, with files of several kinds."""
    here = tmp_path / "here"
    (here / "pkg" / "inner").mkdir(parents=True)
    for name in ("train.py", "test.py", "notes.txt", ".hidden.py", "pkg/main.py"):
        (here / name).write_text("")
    monkeypatch.chdir(here)
    return here


def test_subcommands() -> None:
    assert completed("ti") == ["timeline"]
    assert completed("timeline", "") == ["merge", "summary"]


def test_keys_of_the_config_file_are_options(site: Site) -> None:
    """Each setting, of the core and of plugins, and both names of a switch."""
    site.install("ddl-pigeon", PLUGIN)
    for row in SETTINGS:
        assert row.flag in completed("run", row.flag), row.name
    assert completed("run", "--pigeon") == ["--pigeon-loft"]
    assert completed("run", "--no-rep") == ["--no-replay"]
    assert completed("bench", "--fusion-b") == ["--fusion-bytes"]


@pytest.mark.parametrize(
    ("incomplete", "found"),
    [
        ("t", ["train.py", "test.py"]),
        ("tr", ["train.py"]),
        ("pkg/m", ["pkg/main.py"]),
        ("./tr", ["./train.py"]),
        ("p", ["pkg/", "python"]),
        ("", ["test.py", "train.py", "pkg/", "python"]),
        (".h", [".hidden.py"]),
    ],
)
def test_the_script(incomplete: str, found: list[str], folder: Path) -> None:
    """Python files, the directories they may be in, and Python itself."""
    assert completed("run", "-np", "2", incomplete) == sorted(found, key=lambda name: (name[-1] in "/n", name))
    assert completed("tune", incomplete) == completed("doctor", "-np", "2", incomplete) != []


@pytest.mark.parametrize("incomplete", ["pkg/in", "no", "absent/", "~surely-no-user/", "pk"])
def test_a_word_that_is_no_script(incomplete: str, folder: Path) -> None:
    """Is left to the shell as a directory, in which a script may be; one that does not exist has nothing in it."""
    found = items("run", "-np", "2", incomplete)
    assert [one.type for one in found] == ([] if incomplete in ("absent/", "~surely-no-user/") else ["dir"])


@pytest.mark.parametrize("before", [["train.py"], ["train.py", "--backend"], ["python"], ["-m", "timeit"]])
@pytest.mark.parametrize("incomplete", ["", "--ba"])
def test_words_of_the_script_are_no_options_of_ours(before: list[str], incomplete: str, folder: Path) -> None:
    """A shell completes them as files, as for any other program."""
    assert left_to_shell("run", "-np", "2", *before, incomplete) == "file"


def test_backends(site: Site) -> None:
    """Those that processes can use, built in and of plugins; and the second one of two."""
    site.install("ddl-pigeon", PLUGIN)
    found = completed("run", "--backend", "")
    assert {"auto", "shm", "pigeon"} <= set(found)
    assert not {"threads", "solo", "hierarchical"} & set(found)
    assert completed("run", "--backend", "pi") == ["pigeon"]
    assert completed("run", "--backend", "shm+p") == ["shm+pigeon"]
    assert "shm+shm" not in completed("run", "--backend", "shm+")
    assert items("run", "--backend", "pi")[0].help == "by air"
    assert completed("run", "--backend=pi") == ["pigeon"]


def test_devices(site: Site) -> None:
    """Transports that serve an accelerator."""
    site.install("ddl-pigeon", PLUGIN)
    found = completed("run", "--device-dense", "")
    assert {"auto", "cpu", "owl"} <= set(found)
    assert not {"shm", "pigeon"} & set(found)


def test_plugins(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of distributions, of which a list has each once; those that are turned off, too."""
    site.install("ddl-pigeon", PLUGIN)
    site.install("ddl-penguin", "@hookimpl\ndef ddl_adapters(): return [AdapterProvider('ice', 'a:B')]")
    assert completed("run", "--plugins-off", "ddl-p") == ["ddl-penguin", "ddl-pigeon", "ddl-prometheus"]
    assert completed("run", "--plugins", "ddl-pigeon,ddl-p") == ["ddl-pigeon,ddl-penguin", "ddl-pigeon,ddl-prometheus"]
    monkeypatch.setenv("DDL_PLUGINS_OFF", "ddl-penguin")
    assert completed("run", "--plugins", "ddl-pen") == ["ddl-penguin"]
    assert "ddlcore" not in completed("run", "--plugins", "")


def test_plugins_that_have_a_suite(site: Site) -> None:
    """By their own names and by those of their distributions."""
    site.install("ddl-pigeon", PLUGIN)
    assert completed("conform", "pi") == ["pigeon"]
    assert completed("conform", "ddl-pi") == ["ddl-pigeon"]
    assert "transport" in completed("conform", "--kind", "")
    assert "transport" in completed("plugins", "new", "")


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--launcher", {"auto", "ssh", "srun"}),
        ("--tuner", {"auto", "bayes", "grid", "wise"}),
        ("--compression", {"none", "fp16", "bf16"}),
        ("--fusion-policy", {"threshold"}),
        ("--overlap", {"auto", "on", "off"}),
        ("--log-level", {"DEBUG", "INFO", "WARNING", "ERROR"}),
        ("--device-sparse", {"auto", "cpu"}),
    ],
)
def test_values_of_settings(option: str, names: set[str], site: Site) -> None:
    """Where there is a list of them, with those of plugins."""
    site.install("ddl-pigeon", PLUGIN)
    assert names <= set(completed("run", option, ""))


def test_lists_of_the_benchmark() -> None:
    assert completed("bench", "--ops", "allreduce,allg") == ["allreduce,allgather"]
    assert "allreduce,allreduce" not in completed("bench", "--ops", "allreduce,")
    assert completed("bench", "--dtype", "bf") == ["bf16"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("run", "--hostfile"), "file"),
        (("doctor", "--hostfile"), "file"),
        (("run", "--config"), "file"),
        (("run", "--ssh-identity-file"), "file"),
        (("run", "--timeline"), "file"),
        (("run", "--output-dir"), "dir"),
        (("run", "--flight-dir"), "dir"),
        (("plugins", "new", "--into"), "dir"),
        (("timeline", "summary"), "file"),
    ],
)
def test_paths_are_left_to_the_shell(words: tuple[str, ...], kind: str) -> None:
    assert left_to_shell(*words, "x") == kind


@pytest.mark.parametrize("words", [("--backend",), ("--plugins",), ("--tuner",), ("--device-dense",)])
def test_a_wrong_variable_completes_nothing(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """And raises nothing, which the shell would write into the user's line."""
    monkeypatch.setenv("DDL_GRACE_S", "soon")
    assert items("run", *words, "") == []
    assert items("conform", "") == []


def test_a_shell_asks(ddl: Ddl, tmp_path: Path) -> None:
    """By its variables; the answer has a line for each word, and nothing else is written."""
    (tmp_path / "train.py").write_text("")
    asked = {"_DDL_COMPLETE": "bash_complete", "COMP_WORDS": "ddl run -np 2 tr", "COMP_CWORD": "4"}
    done = ddl(env=asked)
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain,train.py\n", "")
    done = ddl(env={**asked, "COMP_WORDS": "ddl run --backend sh", "COMP_CWORD": "3"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain,shm\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_that_turns_it_on(shell: str, ddl: Ddl) -> None:
    """What the documentation has a shell read names the variable by which that shell asks."""
    done = ddl(env={"_DDL_COMPLETE": f"{shell}_source"})
    assert done.returncode == 0
    assert f"_DDL_COMPLETE={shell}_complete" in done.stdout
    page = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
    assert f"_DDL_COMPLETE={shell}_source ddl" in page


def test_nothing_is_imported_for_it_without_need(ddl: Ddl) -> None:
    """A start that no shell asked for imports no part of click that serves shells."""
    done = ddl("run", "--version", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    assert "ddlcore.launch.job.placement" in done.stderr  # the command was read
    assert "click.shell_completion" not in done.stderr
