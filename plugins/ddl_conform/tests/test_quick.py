"""``ddl conform --quick``: a trial of each plugin, with three elements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from ddl_conform.quick import trial, trials

from ddlcore.commands.cli import main
from ddlcore.commands.plugins.listing import READY, Row, rows
from ddlcore.plug.settings import settings_of
from tests.plug.conftest import Site, site

__all__ = ["site"]

NEEDS = (
    "@hookimpl\ndef ddl_tuners():"
    " return [TunerProvider('wise', 'a:B', requires=('oracle',), install='pip install oracle')]"
)
TRIED = """
@hookimpl
def ddl_compressors():
    return [CompressorProvider("crash", "ddl_tried:Crash"), CompressorProvider("wrong", "ddl_tried:Wrong")]

def __getattr__(name):
    from ddlcore.builtin.compressors import Unchanged
    class Crash(Unchanged):
        def encode(self, *arguments):
            import os
            os.abort()
    class Wrong(Unchanged):
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
    monkeypatch.setenv("DDL_PLUGINS", "ddl-tried,ddl-conform,ddl-shm")
    capsys.readouterr()
    assert main(["conform", "--quick", "--json"]) == 1
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
    """The rows of all plugins that can be tried: those of ddlcore and ddl-conform, and the two of ``TRIED``."""
    site.install("ddl-tried", TRIED)
    monkeypatch.setenv("DDL_PLUGINS", "ddl-tried,ddl-conform")
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
    """This test runs each trial in a real process."""
    (row,) = trials.tried([row for row in tried if row.name == "crash"])
    assert row.state == "fails" and row.reason.startswith("its trial ended with code -6: "), row


@pytest.mark.parametrize(("state", "code"), [("works", 0), ("fails", 1)])
def test_a_plugin_that_fails_its_trial_is_the_exit_code(
    state: str, code: int, site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be used is not tried, and keeps its reason."""
    site.install("ddl-needs", NEEDS)
    names: list[str] = []

    def tried(rows: list[Row], told: Any) -> list[Row]:
        names.extend(row.name for row in rows)
        return [row.told(state if row.name == "threshold" else "works", f"{row.name} told this") for row in rows]

    monkeypatch.setattr("ddl_conform.quick.probing.tried", tried)
    capsys.readouterr()
    assert main(["conform", "--quick", "--json"]) == code
    found = {row["name"]: (row["state"], row["reason"]) for row in json.loads(capsys.readouterr().out)["plugins"]}
    assert found["threshold"] == (state, "threshold told this")
    assert found["wise"] == ("not usable", "oracle not installed; pip install oracle") and "wise" not in names
    assert names and all(found[name][1] == f"{name} told this" for name in set(names))


def test_one_plugin_is_tried_by_its_name(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all of one distribution; a name that nothing has is refused."""
    site.install("ddl-needs", NEEDS)
    monkeypatch.setattr("ddl_conform.quick.probing.tried", lambda rows, told: [row.told("works", "") for row in rows])
    capsys.readouterr()
    assert main(["conform", "--quick", "shm", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["plugins"]] == ["shm"]
    assert main(["conform", "--quick", "ddl-needs", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["plugins"]] == ["wise"]
    assert main(["conform", "--quick", "pigeon"]) == 2
    assert "nothing is called 'pigeon'" in capsys.readouterr().err


@pytest.mark.parametrize("installed", [True, False])
def test_what_ddl_doctor_uses_is_tried_where_that_is(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = settings_of({}, warns=False)[1]
    if not installed:
        monkeypatch.setattr(trial, "find_spec", lambda package: None)
    for provider in (registry.checks["known-bad-horovod"], registry.bench_peers["gloo"]):
        if installed:
            assert trial._trial(provider, registry) == "it loads"
        else:
            with pytest.raises(trial._Untried, match=r"is not installed; pip install .*ddl_doctor"):
                trial._trial(provider, registry)
