"""``ddl plugins``: what is installed, in which state and why; a trial of each; and packages for new ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddlcore.commands.cli import main
from ddlcore.commands.plugins import trial, trials
from ddlcore.commands.plugins.listing import READY, Row, rows
from ddlcore.commands.plugins.package import KINDS
from ddlcore.config import read_toml
from ddlcore.plug.settings import settings_of
from tests.plug.conftest import Site, site
from tests.tiers import long

__all__ = ["site"]

LARGE = ("transport", "adapter")  # the kinds whose packages have many tests
GOOD = "@hookimpl\ndef ddl_transports(): return [TransportProvider('pigeon', 'coop:Pigeon'{more})]"
FAULTS = {  # distribution -> its code, what its row says
    "ddl-elsewhen": (
        "@hookimpl\ndef ddl_compressors(): return [CompressorProvider('old', 'a:B', api_version=(3, 0))]",
        "refused",
        "built for plugin contract 3.0, this ddlcore has 2.0",
    ),
    "ddl-second": (GOOD.format(more=""), "refused", "ddl-first 1.0 offers that name already"),
    "ddl-absent": ("import surely_not_there", "refused", "No module named 'surely_not_there'"),
    "ddl-argument": ("@hookimpl\ndef ddl_transports(job): return []", "refused", "hook 'ddl_transports'"),
    "ddl-misspelt": ("@hookimpl\ndef ddl_transprots(): return []", "refused", "unknown hook 'ddl_transprots'"),
    "ddl-setting": (
        "@hookimpl\ndef ddl_adapters():"
        " return [AdapterProvider('greedy', 'a:B', settings=(Setting('fusion_bytes', int, 1, 'mine'),))]",
        "refused",
        "its setting 'fusion_bytes' is one of ddlcore already",
    ),
    "ddl-needs": (
        "@hookimpl\ndef ddl_tuners(): return [TunerProvider('wise', 'a:B', requires=('oracle',), install='pip install oracle')]",
        "not usable",
        "oracle not installed; pip install oracle",
    ),
}


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, str]]:
    capsys.readouterr()
    main(["plugins", "--json", *arguments])
    rows: list[dict[str, str]] = json.loads(capsys.readouterr().out)["plugins"]
    return rows


def test_every_fault_is_told_with_its_distribution(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, and the rest goes on working."""
    site.install("ddl-first", GOOD.format(more=""))
    for name, (code, _, _) in FAULTS.items():
        site.install(name, code, version="0.7")
    rows = listed(capsys)
    for name, (_, state, reason) in FAULTS.items():
        (row,) = [row for row in rows if row["distribution"] == name]
        assert (row["state"], row["version"]) == (state, "0.7"), row
        assert reason in row["reason"], row
    ready = {row["name"] for row in rows if row["state"] == "ready"}
    assert {"pigeon", "shm", "numpy", "threshold"} <= ready
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^name +distribution +version +kind +state +reason$", text, re.MULTILINE)
    assert all(reason in text for _, _, reason in FAULTS.values())


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("DDL_PLUGINS_OFF", "ddl-first", "DDL_PLUGINS_OFF names it"),
        ("DDL_PLUGINS", "ddl-torch", "DDL_PLUGINS does not name it"),
    ],
)
def test_what_the_lists_leave_out_is_off(
    variable: str,
    value: str,
    reason: str,
    site: Site,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the list that does it; no code of it runs."""
    site.install("ddl-first", "raise RuntimeError")
    monkeypatch.setenv(variable, value)
    (row,) = [row for row in listed(capsys) if row["distribution"] == "ddl-first"]
    assert (row["state"], row["reason"]) == ("off", reason)


TRIED = """
@hookimpl
def ddl_compressors():
    return [CompressorProvider("crash", "ddl_tried:Crash"), CompressorProvider("wrong", "ddl_tried:Wrong")]

def __getattr__(name):
    from ddlcore.builtin.compressors import NoCompression
    class Crash(NoCompression):
        def encode(self, *arguments):
            import os
            os.abort()
    class Wrong(NoCompression):
        def decode(self, name, source, target, scale):
            pass
    return {"Crash": Crash, "Wrong": Wrong}[name]
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_trial_of_three_elements(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What works says what it did; what fails or crashes says so, and the exit code is 1."""
    site.install("ddl-tried", TRIED)
    monkeypatch.setenv("DDL_PLUGINS", "ddl-tried")
    capsys.readouterr()
    assert main(["plugins", "--probe", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["plugins"]
    told = {(row["kind"], row["name"]): (row["state"], row["reason"]) for row in rows}
    assert told["transport", "threads"] == ("works", "added 1, 2, 3 over 2 ranks")
    assert told["transport", "solo"] == ("works", "added 1, 2, 3 over 1 rank")
    assert told["transport", "hierarchical"] == ("works", "added 1, 2, 3 over 4 ranks")
    assert told["adapter", "numpy"] == ("works", "a tensor of 1, 2, 3 shows its memory")
    assert told["compressor", "bf16"] == ("works", "1, 2, 3 travelled as bfloat16")
    assert told["launcher", "pbs"] == ("ready", "not tried: it applies where PBS_NODEFILE is set")
    assert told["compressor", "crash"][0] == "fails"
    assert "ended with code -6" in told["compressor", "crash"][1]
    assert told["compressor", "wrong"][0] == "fails"


@pytest.fixture
def tried(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """The rows of all plugins that can be tried: those of ddlcore, and the two of ``TRIED``."""
    site.install("ddl-tried", TRIED)
    monkeypatch.setenv("DDL_PLUGINS", "ddl-tried")
    return [row for row in rows(settings_of(os.environ)[1]) if row.state == READY]


def test_what_a_trial_finds(
    tried: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each plugin: it works, it fails with a reason, or it cannot be tried here."""
    wanted = {
        ("transport", "threads"): ["works", "added 1, 2, 3 over 2 ranks"],
        ("transport", "solo"): ["works", "added 1, 2, 3 over 1 rank"],
        ("adapter", "numpy"): ["works", "a tensor of 1, 2, 3 shows its memory"],
        ("compressor", "wrong"): ["fails", "ValueError: 1, 2, 3 came back as [0.0, 0.0, 0.0]"],
        ("compressor", "bf16"): ["works", "1, 2, 3 travelled as bfloat16"],
        ("fusion policy", "threshold"): ["works", "laid three tensors out as [[0, 1], [2]]"],
        ("tuner", "grid"): ["works", "asked and told three times"],
        ("launcher", "pbs"): ["", "it applies where PBS_NODEFILE is set"],
    }
    monkeypatch.delenv("PBS_NODEFILE", raising=False)
    monkeypatch.setattr(sys, "argv", ["trial", *(word for pair in wanted for word in pair)])
    monkeypatch.setattr(os, "_exit", lambda code: None)
    trial.main()
    lines = capsys.readouterr().out.splitlines()
    told = [json.loads(line.removeprefix("trial: ")) for line in lines if line.startswith("trial: ")]
    assert {(kind, name): [state, reason] for kind, name, state, reason in told} == wanted


def test_a_wrong_sum_fails_a_trial() -> None:
    with pytest.raises(ValueError, match=r"the sum of 1, 2, 3 over 2 ranks came out as \[2.0, 4.0, 5.0\]"):
        trial._right([[2.0, 4.0, 6.0], [2.0, 4.0, 5.0]], 2)


def test_each_foreign_plugin_is_tried_in_a_process_of_its_own(
    tried: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a crash or a hang of one is told as its own failure, and the others are told as they are."""
    groups: list[list[str]] = []

    def run(names: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        groups.append(names)
        if names == ["crash"]:
            return subprocess.CompletedProcess(names, -6, "", "one\nAborted\n")
        if names == ["wrong"]:
            raise subprocess.TimeoutExpired(names, more["timeout"])
        kinds = {row.name: row.kind for row in tried}
        said = [[kinds[name], name, *(("", "why") if name == "pbs" else ("works", f"{name} did"))] for name in names]
        return subprocess.CompletedProcess(names, 0, "".join(f"[0] trial: {json.dumps(one)}\n" for one in said), "")

    monkeypatch.setattr(trials, "_command", lambda group: [row.name for row in group])
    monkeypatch.setattr(subprocess, "run", run)
    begun: list[Row] = []
    results = trials.tried(tried, begun.append)
    assert [row.name for row in results] == [row.name for row in tried]
    assert sorted(map(id, begun)) == sorted(map(id, tried))
    told = {row.name: (row.state, row.reason) for row in results}
    assert told.pop("crash") == ("fails", "its trial ended with code -6: Aborted")
    assert told.pop("wrong") == ("fails", "its trial did not end within 60 s")
    assert told.pop("pbs") == ("ready", "not tried: why")
    assert told == {name: ("works", f"{name} did") for name in told} and {"threads", "numpy", "bf16"} <= set(told)
    alone = {group[0] for group in groups if len(group) == 1}
    assert {"crash", "wrong", *(row.name for row in tried if row.kind == "transport")} <= alone


@pytest.mark.processes
def test_a_plugin_that_crashes_ends_only_its_trial(tried: list[Row]) -> None:
    """The trial is a real process here."""
    (row,) = trials.tried([row for row in tried if row.name == "crash"])
    assert row.state == "fails" and row.reason.startswith("its trial ended with code -6: "), row


@pytest.mark.parametrize(("state", "code"), [("works", 0), ("fails", 1)])
def test_a_plugin_that_fails_its_trial_is_the_exit_code(
    state: str, code: int, site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be used is not tried, and keeps its reason."""
    site.install("ddl-needs", FAULTS["ddl-needs"][0])
    names: list[str] = []

    def tried(rows: list[Row], told: Any) -> list[Row]:
        names.extend(row.name for row in rows)
        return [row.told(state if row.name == "threshold" else "works", f"{row.name} told this") for row in rows]

    monkeypatch.setattr("ddlcore.commands.plugins.command.tried", tried)
    capsys.readouterr()
    assert main(["plugins", "--probe", "--json"]) == code
    found = {row["name"]: (row["state"], row["reason"]) for row in json.loads(capsys.readouterr().out)["plugins"]}
    assert found["threshold"] == (state, "threshold told this")
    assert found["wise"] == ("not usable", "oracle not installed; pip install oracle") and "wise" not in names
    assert names and all(found[name][1] == f"{name} told this" for name in set(names))


# --- new packages


def run_pytest(folder: Path) -> dict[str, str]:
    """The tests that fail in a new package, and why."""
    path = os.pathsep.join([str(folder / "src"), *(entry for entry in sys.path if entry)])
    environ = os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "500"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "tests"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=220)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+?)(?: - (.*))?$", done.stdout, re.MULTILINE)
    return dict(lines)


@pytest.mark.processes
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind not in LARGE), *long(*LARGE)])
def test_a_new_package_fails_only_for_what_is_to_be_written(kind: str, tmp_path: Path) -> None:
    """Each failure is a NotImplementedError with the name of a method; its metadata name the module with the hooks."""
    assert main(["plugins", "new", kind, "my-own", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "ddl-my-own"
    project: Any = read_toml(folder / "pyproject.toml")["project"]
    assert project["entry-points"]["ddlcore.plugins.v2"] == {"my-own": "ddl_my_own.plugin"}
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in texts if re.search(r"@[A-Z]+@", text)]
    assert (folder / "src/ddl_my_own/py.typed").exists()
    failures = run_pytest(folder)
    assert failures
    wrong = {
        n: why for n, why in failures.items() if not re.match(r"NotImplementedError: \w+\.\w+ is still to be", why)
    }
    assert wrong == {}


@pytest.mark.processes
def test_conform_lists_what_is_to_be_written(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, and each method with its place."""
    main(["plugins", "new", "compressor", "mine", "--into", str(tmp_path)])
    monkeypatch.syspath_prepend(str(tmp_path / "ddl-mine/src"))
    site.announce("ddl-mine", "0.1.0", "mine = ddl_mine.plugin")
    capsys.readouterr()
    assert main(["conform", "mine"]) == 1
    text = capsys.readouterr().out
    assert "wire_dtype() is still to be written" in text
    methods = re.findall(r"^    Mine\w*Compressor\.(\w+)  \(.*/compressor.py:\d+\)$", text, re.MULTILINE)
    assert methods == ["wire_dtype", "encode", "decode"]


@pytest.mark.parametrize("name", ["Mine", "a b", "", "-x", "1a", "../up", "x--y"])
def test_bad_names_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, and nothing is written."""
    assert main(["plugins", "new", "--into", str(tmp_path), "--", "fusion", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written over."""
    (tmp_path / "ddl-mine").mkdir()
    assert main(["plugins", "new", "fusion", "mine", "--into", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert list((tmp_path / "ddl-mine").iterdir()) == []
