"""``ddl info`` says what is here and what is missing, and imports no framework for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ddlcore.commands.info.facts import all_facts
from ddlcore.config.loading import load_settings
from ddlcore.contracts import Library
from ddlcore.hooks import KernelsProvider, TransportProvider
from ddlcore.plug.registry import Distribution, Refusal, Registry
from ddlcore.text.columns import table
from tests.launch.starting import Ddl, environment

FRAMEWORKS = ("torch", "tensorflow", "mxnet", "keras", "numba", "skopt")

HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def test_sections_and_missing_parts(ddl: Ddl) -> None:
    """Everything has a row with its state, and what is not there the exact line that brings it."""
    done = ddl("info")
    assert done.returncode == 0, done.stderr
    for word in (
        "machine",
        "frameworks",
        "transports",
        "adapters",
        "fusion policies",
        "compressors",
        "kernels",
        "bench peers",
        "commands",
        "launchers",
        "route",
    ):
        assert f"\n{word}\n" in done.stdout
    assert "one host   shm" in done.stdout


def test_json_has_the_same(ddl: Ddl) -> None:
    """For machines."""
    facts = json.loads(ddl("info", "--json").stdout)
    rows = {row["name"]: row for row in facts["transports"]}
    assert rows["shm"]["state"] == "ready"
    assert all(bool(row["missing"]) == (row["state"] != "ready") for row in facts["transports"])
    routes = {row["where"]: row["transport"] for row in facts["route"]}
    assert list(routes) == ["one rank", "one host", "two hosts"]
    assert (routes["one rank"], routes["one host"]) == ("solo", "shm")
    assert {row["name"] for row in facts["compressors"]} >= {"none", "fp16", "bf16"}


def test_what_is_known_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with the line that brings it, or that says that it is off; none for what has another name here."""
    known = {"transport": {"pigeon": "ddl-pigeon", "shm": "pytest", "owl": "ddl-owl"}}
    monkeypatch.setattr("ddlcore.commands.info.facts.ALIASES", known)
    registry = Registry()
    registry.refusals.append(Refusal(Distribution("ddl-owl", "2"), "owl", "", "DDL_PLUGINS_OFF names it", off=True))
    facts = all_facts(load_settings({}), registry)
    assert [(row["name"], row["state"], row["missing"]) for row in facts["transports"]] == [
        ("pigeon", "not installed", "pip install ddl-pigeon"),
        ("owl", "off", "ddl-owl 2 is off: DDL_PLUGINS_OFF names it"),
    ]


def test_what_a_library_offers() -> None:
    """Stands with the transport that it is behind, where that can be used."""
    registry = Registry()
    place = f"{__name__}:"
    pigeon = TransportProvider("pigeon", "x:Y", probe=place + "nothing", library=place + "loft", doc="birds")
    cat = TransportProvider("cat", "x:Y", probe=place + "dogs", library=place + "loft", doc="by night")
    mouse = TransportProvider("mouse", "x:Y", library="no.such:module", doc="by day")
    for provider in (pigeon, cat, mouse):
        registry.offer(provider, Distribution("zoo", "1"))
    rows = {row["name"]: row for row in all_facts(load_settings({}), registry)["transports"]}
    assert rows["pigeon"]["what"] == "birds: loft 12 (in /loft)"
    assert (rows["cat"]["state"], rows["cat"]["missing"], rows["cat"]["what"]) == (
        "not usable",
        "dogs; wait",
        "by night",
    )
    assert (rows["mouse"]["state"], rows["mouse"]["what"]) == ("ready", "by day")


def test_what_serves_devices() -> None:
    """Its kernels have a row, with what keeps them from being used here."""
    registry = Registry()
    for name, probe in (("near", "nothing"), ("far", "dogs")):
        provider = KernelsProvider(name, "x:Y", probe=f"{__name__}:{probe}", doc="of sand", device="sand")
        registry.offer(provider, Distribution("zoo", "1"))
    rows = {row["name"]: row for row in all_facts(load_settings({}), registry)["kernels"]}
    assert (rows["near"]["state"], rows["near"]["missing"]) == ("ready", "")
    assert (rows["far"]["state"], rows["far"]["missing"]) == ("not usable", "dogs; wait")
    assert rows["near"]["from"] == "zoo 1" and rows["near"]["what"] == "of sand"


def nothing() -> str:
    """A probe that finds all well."""
    return ""


def dogs() -> str:
    """One that does not."""
    return "dogs; wait"


def loft() -> Library:
    """What the library is."""
    return Library("loft 12", 12, {"in": "/loft"})


def test_check_build_is_info(ddl: Ddl) -> None:
    """`ddl run --check-build` prints it, without -np and without a command."""
    assert ddl("run", "--check-build").stdout.startswith("ddl 0.")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment(None)
    )


def test_no_framework_is_imported() -> None:
    """Versions come from metadata."""
    done = run_python(
        "import sys\nfrom ddlcore.commands.cli import main\nassert main(['info']) == 0\n"
        f"print('imported:', [name for name in {FRAMEWORKS} if name in sys.modules])"
    )
    assert done.stdout.rstrip().endswith("imported: []"), done.stdout + done.stderr


def test_a_hidden_framework_is_not_installed() -> None:
    """`ddl info` exits with 0 where torch cannot be found, and says so."""
    done = run_python(f"{HIDE}\nfrom ddlcore.commands.cli import main\nsys.exit(main(['info', '--json']))")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["frameworks"]}
    assert (rows["torch"]["state"], rows["torch"]["missing"]) == ("not installed", "pip install torch")


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([], []),
        ([{"a": "x", "b": ""}, {"a": "long", "b": ""}], ["a", "x", "long"]),
        ([{"a": "x", "b": "1"}, {"a": "long", "b": "22"}], ["a     b", "x     1", "long  22"]),
    ],
)
def test_tables_are_aligned(rows: list[dict[str, str]], lines: list[str]) -> None:
    """Columns stand under each other, empty ones are left out."""
    assert table(rows) == lines
