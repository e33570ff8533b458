"""``ddl conform`` runs a plugin's suite in a process of its own, and says what came out and how far that reaches."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from ddl_conform.conform.kinds import KINDS, ProviderUnderTest, _named, subjects, suites_of
from ddl_conform.conform.watch import ConformRun
from ddl_conform.killed import KilledSuite
from ddl_conform.levels import LEVELS, LevelResult, reached

from ddlcore.commands.cli import main
from ddlcore.errors import PluginError
from ddlcore.plug.settings import settings_of
from ddlcore.text.installing import pip_install
from plugins.ddl_conform.tests.shm_mutants import MUTANTS
from tests.plug.conftest import Site, site
from tests.tiers import long

__all__ = ["site"]

pytestmark = pytest.mark.processes
WAITS = ("hangs-in-abort", "leaks-a-segment", "unequal-tails", "swaps-collectives")  # for a limit in seconds
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")

ENDS = """
import os, time
from ddlcore.testing import FusionSuite
from ddlcore.builtin.fusion import ThresholdFusion

class Fusion(ThresholdFusion):
    pass

class Suite(FusionSuite):
    def make(self):
        return Fusion()
    def test_it_crashes(self):
        os.abort()
    def test_it_hangs(self):
        time.sleep(60)

@hookimpl
def ddl_fusion_policies():
    return [FusionProvider("ends", "ddl_ends:Fusion", suite="ddl_ends:Suite")]
"""

HANGS_OFTEN = """
import os
import pytest
from ddlcore.testing import FusionSuite
from ddlcore.builtin.fusion import ThresholdFusion

def look_up(table):
    return table[None]

class Suite(FusionSuite):
    def make(self):
        return ThresholdFusion()
    def test_a_key_is_missing(self):
        look_up({})
    def test_nothing_is_told(self):
        assert not look_up({None: 1})
    def test_it_does_not_raise(self):
        with pytest.raises(ValueError):
            pass
    @pytest.mark.parametrize("time", range(9))
    def test_it_ends_the_process(self, time):
        os._exit(3)
    def test_after_them(self):
        pass

@hookimpl
def ddl_fusion_policies():
    target = "ddlcore.builtin.fusion:ThresholdFusion"
    return [FusionProvider("often", target, suite="ddl_often:Suite")]
"""

LAX = """
import pytest
from ddlcore.testing import FusionSuite
from ddlcore.builtin.fusion import ThresholdFusion

class Removed(FusionSuite):
    test_the_limit_is_kept = None
    def make(self):
        return ThresholdFusion()

class Overridden(FusionSuite):
    def make(self):
        return ThresholdFusion()
    def test_the_limit_is_kept(self):
        pass

class Honest(Overridden):
    @pytest.mark.skip(reason="buckets of this network have a size of their own")
    def test_the_limit_is_kept(self):
        pass

@hookimpl
def ddl_fusion_policies():
    target = "ddlcore.builtin.fusion:ThresholdFusion"
    return [FusionProvider(name.lower(), target, suite=f"ddl_lax:{name}") for name in ("Removed", "Overridden", "Honest")]
"""


ABSENT = """
from ddlcore.testing import FusionSuite
from ddlcore.builtin.fusion import ThresholdFusion

class Suite(FusionSuite):
    def make(self):
        return ThresholdFusion()

def probe():
    return "no loft; build one"

@hookimpl
def ddl_fusion_policies():
    told = {"target": "ddlcore.builtin.fusion:ThresholdFusion", "probe": "ddl_absent:probe", "suite": "ddl_absent:Suite"}
    return [FusionProvider("alone", **told, suite_over="a stuffed bird"), FusionProvider("bound", **told)]
"""


def conform(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Any]]:
    """The exit code, and what it tells machines."""
    capsys.readouterr()
    code = main(["conform", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def failed(run: Any) -> dict[str, str]:
    return {test["name"]: test["reason"] for test in run["tests"] if test["outcome"] == "failed"}


@LINUX
@pytest.mark.timeout(270)
@pytest.mark.long
def test_shared_memory_is_fault_tolerant(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole suite passes, on ranks that are threads."""
    code, (run,) = conform(capsys, "shm")
    assert (code, failed(run), run["level"], run["next"]) == (0, {}, "fault-tolerant", "")
    assert len(run["tests"]) > 150


@LINUX
@pytest.mark.parametrize("name", [*(name for name in MUTANTS if name not in WAITS), *long(*WAITS)])
def test_a_mutant_fails_at_the_test_that_is_named(name: str, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """With words that tell the fault; the exit code is 1."""
    site.install("ddl-mutants", "from plugins.ddl_conform.tests.shm_mutants import *")
    _, test, complaint = MUTANTS[name]
    code, (run,) = conform(capsys, name, "--only", test)
    reasons = failed(run)
    assert code == 1, run["refused"]
    assert reasons, f"{name} passed {test}"
    assert re.search(complaint, " ".join(reasons.values())), reasons


@LINUX
def test_the_same_tests_pass_without_the_faults(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """What they find is the fault, not the way in which the mutants are run."""
    site.install("ddl-mutants", "from plugins.ddl_conform.tests.shm_mutants import *")
    tests = [test for _, test, _ in MUTANTS.values()]
    code, (run,) = conform(capsys, "without-a-fault", *(word for test in tests for word in ("--only", test)))
    assert (code, failed(run)) == (0, {})
    ran = {test["name"] for test in run["tests"] if test["outcome"] == "passed"}
    assert {test.partition("[")[0] for test in tests} == {name.partition("[")[0] for name in ran}


@pytest.mark.long
def test_what_passes_reaches_its_level(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0; for people a line a test and the level, which for some kinds is full at the most."""
    assert main(["conform", "threshold"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("threshold, a fusion policy of ddlcore")
    assert "passed   test_the_limit_is_kept" in text
    assert "level: full\n" in text


@pytest.mark.long
def test_a_crash_and_a_hang_are_failures_of_their_tests(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The other tests run all the same."""
    site.install("ddl-ends", ENDS)
    code, (run,) = conform(capsys, "ends", "--test-timeout", "12")  # the other tests need a second, or ten under load
    reasons = failed(run)
    assert code == 1
    assert reasons["test_it_crashes"] == "it ended the process by signal SIGABRT"
    assert reasons["test_it_hangs"] == "it was not over in time; its process was ended"
    assert len(reasons) == 2
    assert sum(test["outcome"] == "passed" for test in run["tests"]) == 5


@pytest.mark.long
def test_what_comes_after_too_many_crashes_is_not_run(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """It has not failed, and is told apart for people and for machines; the level is not reached."""
    site.install("ddl-often", HANGS_OFTEN)
    code, (run,) = conform(capsys, "often")
    outcomes = {test["name"]: test["outcome"] for test in run["tests"]}
    assert (code, run["ok"], run["level"]) == (1, False, "basic")
    assert {outcomes[f"test_it_ends_the_process[{time}]"] for time in range(9)} == {"failed"}
    assert outcomes["test_after_them"] == "not run"
    (reason,) = [test["reason"] for test in run["tests"] if test["outcome"] == "not run"]
    assert reason == "9 tests before it hung or ended their process"
    assert main(["conform", "often"]) == 1
    text = capsys.readouterr().out
    assert "    not run  test_after_them: 9 tests before it hung or ended their process\n" in text
    assert re.search(r"\n  \d+ passed, 12 failed, 1 not run, 0 skipped in ", text), text


def test_an_error_is_told_with_its_place(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The innermost line of the plugin, of an error whose message says nothing; the test's line, if there is no other."""
    site.install("ddl-often", HANGS_OFTEN)
    told = ["test_a_key_is_missing", "test_nothing_is_told", "test_it_does_not_raise"]
    code, (run,) = conform(capsys, "often", *(word for test in told for word in ("--only", test)))
    reasons = failed(run)
    assert code == 1 and set(reasons) == set(told)
    assert re.fullmatch(r"KeyError: None \(\S+ddl_often\S*\.py:\d+, in look_up\)", reasons[told[0]]), reasons
    assert re.fullmatch(r"AssertionError \(\S+ddl_often\S*\.py:\d+, in test_nothing_is_told\)", reasons[told[1]])
    assert re.fullmatch(
        r"Failed: DID NOT RAISE .*ValueError.* \(\S+\.py:\d+, in test_it_does_not_raise\)", reasons[told[2]]
    )


@pytest.mark.long
def test_standard_tests_that_are_missing_fail(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Removed or overridden without a reason; with one the suite is honest, but the level is not reached for nothing."""
    site.install("ddl-lax", LAX)
    code, runs = conform(capsys, "ddl-lax", "--only", "test_every_standard_test_stands")
    assert code == 1
    removed, overridden, honest = (failed(run).get("test_every_standard_test_stands", "") for run in runs)
    assert "removes test_the_limit_is_kept" in removed
    assert "overrides test_the_limit_is_kept" in overridden
    assert honest == ""


@pytest.mark.long
def test_a_suite_that_stands_by_itself_runs_without_the_part(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """And says first over what, and what is missing; another suite is refused as the part is."""
    site.install("ddl-absent", ABSENT)
    assert main(["conform", "alone"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  its suite runs over a stuffed bird"
    assert lines[2] == "  alone itself cannot be used here: no loft; build one"
    assert "  level: full" in lines
    _, (run,) = conform(capsys, "alone", "--only", "test_the_limit_is_kept")
    assert (run["over"], run["missing"], run["ok"]) == ("a stuffed bird", "no loft; build one", True)
    assert main(["conform", "bound"]) == 2
    assert "cannot be used: no loft; build one" in capsys.readouterr().err


def test_a_part_that_is_missing_is_refused_unless_its_suite_stands_by_itself(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report says first over what the suite runs, and what is missing. Nothing is run of what is refused."""
    site.install("ddl-absent", ABSENT)
    ran: list[str] = []

    def run_suite(subject: ProviderUnderTest, **more: object) -> ConformRun:
        ran.append(subject.provider.name)
        return ConformRun(subject, [LevelResult("test_the_limit_is_kept", "passed")])

    monkeypatch.setattr("ddl_conform.conform.command.run_suite", run_suite)
    assert main(["conform", "bound"]) == 2
    assert "cannot be used: no loft; build one" in capsys.readouterr().err
    assert main(["conform", "ddl-absent"]) == 2 and ran == []
    capsys.readouterr()
    assert main(["conform", "alone"]) == 0 and ran == ["alone"]
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "  its suite runs over a stuffed bird",
        "  alone itself cannot be used here: no loft; build one",
    ]
    _, (run,) = conform(capsys, "alone", "--only", "test_the_limit_is_kept")
    assert (run["over"], run["missing"], run["ok"]) == ("a stuffed bird", "no loft; build one", True)


def test_a_suite_that_stands_by_itself_is_made_without_the_part(site: Site) -> None:
    """The class to test is only imported. For other suites the part must be usable."""
    site.install("ddl-absent", ABSENT)
    registry = settings_of(os.environ)[1]
    (alone,), (bound,) = subjects(registry, "alone"), subjects(registry, "bound")
    tested, suites = suites_of(alone, registry)
    assert tested.__name__ == "ThresholdFusion" and [suite.__module__ for suite in suites] == ["ddl_absent"]
    with pytest.raises(PluginError, match="no loft; build one"):
        suites_of(bound, registry)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nobody"], "nothing that has a suite is called 'nobody'; there are solo, threads, gloo"),
        (["shm", "--kind", "launcher"], "no launcher is called 'shm'; there are ssh"),
        (["threshold", "--only", "test_nothing"], "no test is called test_nothing"),
    ],
)
def test_nothing_to_run(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one line that says what there is."""
    assert main(["conform", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_without_pytest_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name == "pytest" else found(name, *more)
    )
    assert main(["conform", "threshold"]) == 2
    assert f"pytest not installed; {pip_install('ddl-conform')}" in capsys.readouterr().err


def test_an_adapter_without_a_suite_is_told_what_to_write(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Only its author knows how a tensor is made."""
    code = (
        "@hookimpl\ndef ddl_adapters(): return [AdapterProvider('bare', 'ddlcore.builtin.numpy_adapter:NumpyAdapter')]"
    )
    site.install("ddl-bare", code)
    assert main(["conform", "bare"]) == 2
    assert "write a subclass of ddlcore.testing.AdapterSuite" in capsys.readouterr().out


# --- levels


@pytest.mark.parametrize("kind", LEVELS)
def test_the_table_of_levels_names_standard_tests(kind: str) -> None:
    """Each exists in the suite of its kind."""
    suite = _named(KINDS[kind].suite)
    if kind == "transport":
        suite = type("Both", (suite, KilledSuite), {})
    assert [test for tests in LEVELS[kind].values() for test in tests if not hasattr(suite, test)] == []


def test_every_door_that_has_a_suite_has_levels() -> None:
    assert set(LEVELS) == set(KINDS)


def _results(**outcomes: str) -> list[LevelResult]:
    return [LevelResult(name, outcome, "a reason" if outcome != "passed" else "") for name, outcome in outcomes.items()]


@pytest.mark.parametrize(
    ("changed", "level", "why"),
    [
        ({}, "fault-tolerant", ""),
        ({"test_there_and_back": "failed"}, "none", "test_there_and_back failed"),
        ({"test_there_and_back": "skipped"}, "none", "test_there_and_back did not run (a reason)"),
        ({"test_scales_apply": "failed"}, "basic", "test_scales_apply failed"),
        ({"test_scales_apply": "skipped"}, "fault-tolerant", ""),
        ({"test_names_do_not_meet": "skipped"}, "full", "test_names_do_not_meet did not run (a reason)"),
        ({"test_names_do_not_meet": "failed"}, "full", "test_names_do_not_meet failed"),
        ({"test_scales_apply": "not run"}, "basic", "test_scales_apply did not run"),
    ],
)
def test_levels(changed: dict[str, str], level: str, why: str) -> None:
    """What failed keeps its level and those above; of basic and fault-tolerant, so does what was skipped."""
    names = [test for tests in LEVELS["compressor"].values() for test in tests]
    outcomes = {**dict.fromkeys([*names, "test_scales_apply"], "passed"), **changed}
    assert reached("compressor", _results(**outcomes)) == (level, why)


def test_the_table_in_the_documents_is_this_one() -> None:
    """docs/plugins.md lists the tests of each level."""
    text = (Path(__file__).resolve().parents[3] / "docs/plugins.md").read_text()
    missing = [test for levels in LEVELS.values() for tests in levels.values() for test in tests if test not in text]
    assert missing == []
    assert settings_of({})[1].problems == []
