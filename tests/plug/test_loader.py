"""Plugins are found by entry points; a broken one becomes one line that names it, and the rest goes on."""

from __future__ import annotations

import re
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from ddlcore.config.loading import load_settings
from ddlcore.plug import Registry, load_plugins

if TYPE_CHECKING:
    from tests.plug.conftest import Site

GOOD = """
    @hookimpl
    def ddl_transports():
        return [TransportProvider(name="pigeon", target="coop:Pigeon", install="pip install pigeon")]
"""

BROKEN = {
    "raises when imported": ("raise RuntimeError('no\\ncoop')", "RuntimeError: no coop"),
    "exits when imported": ("raise SystemExit(3)", "SystemExit: 3"),
    "needs a module that is not there": ("import surely_not_there", "No module named 'surely_not_there'"),
    "has no hook": ("x = 1", "it has no hook"),
    "takes an argument that the hook lacks": (
        "@hookimpl\ndef ddl_transports(job): return []",
        "hook 'ddl_transports'",
    ),
    "misspells a hook": (
        "@hookimpl\ndef ddl_transport(): return []",
        "unknown hook 'ddl_transport'; did its author mean ddl_transports?",
    ),
    "forgets to return": ("@hookimpl\ndef ddl_transports(): []", "ddl_transports returned None"),
    "raises in a hook": ("@hookimpl\ndef ddl_transports(): raise OSError('wet')", "OSError: wet"),
    "gives something that is no provider": (
        "@hookimpl\ndef ddl_transports(): return ['pigeon']",
        "'pigeon', which is no TransportProvider",
    ),
    "gives another kind's provider": (
        "@hookimpl\ndef ddl_compressors(): return [TransportProvider('pigeon', 'coop:Pigeon')]",
        "which is no CompressorProvider",
    ),
    "gives nothing that can be iterated": ("@hookimpl\ndef ddl_transports(): return 7", "TypeError"),
}


def test_builtin_parts_come_through_the_hooks() -> None:
    """Without a plugin the registry holds what ddlcore itself offers, its origin included."""
    registry = load_plugins(load_settings({}, flags={"plugins_off": "torch"}))
    assert set(registry.transports) >= {"solo", "shm"}
    assert "numpy" in registry.adapters
    assert "threshold" in registry.fusion_policies
    assert set(registry.compressors) >= {"none", "fp16", "bf16"}
    assert registry.distribution(registry.transports["solo"]).name == "ddlcore"


def test_an_installed_plugin_is_found(site: Site) -> None:
    """A distribution's provider stands in the registry with its origin, and its target was not imported."""
    site.install("ddl-pigeon", GOOD, version="2.5")
    registry = site.load()
    assert registry.problems == []
    assert str(registry.distribution(registry.transports["pigeon"])) == "ddl-pigeon 2.5"
    assert "coop" not in sys.modules


def test_a_plugin_is_listed_without_importing_its_package(site: Site) -> None:
    """The package's __init__, which imports a framework, does not run; so a missing framework hides no plugin."""
    code = "from dataclasses import dataclass\n@dataclass\nclass Unused:\n    x: int\n" + textwrap.dedent(GOOD)
    site.install_package("ddl-pigeon", "import surely_not_there", code, "ddl_pigeon.plugin")
    registry = site.load()
    assert registry.problems == []
    assert "pigeon" in registry.transports
    assert "ddl_pigeon" not in sys.modules


def test_a_plugin_may_be_an_object(site: Site) -> None:
    """An entry point of the form module:object names any object with hooks."""
    code = (
        "class Bird:\n"
        + textwrap.indent(textwrap.dedent(GOOD).replace("ports()", "ports(self)"), "    ")
        + "\nbird = Bird()"
    )
    site.install_package("ddl-pigeon", "", code, "ddl_pigeon.plugin:bird")
    registry = site.load()
    assert registry.problems == []
    assert "pigeon" in registry.transports


@pytest.mark.parametrize("value", ["ddl_pigeon.nothing", "ddl_pigeon.plugin:nothing", "nothing.plugin"])
def test_an_entry_point_to_nothing_is_a_problem(site: Site, value: str) -> None:
    """An entry point whose module or object does not exist is one line, as any broken plugin."""
    site.install_package("ddl-pigeon", "", GOOD, value)
    (problem,) = site.load().problems
    assert "ddl-pigeon 1.0" in problem
    assert "nothing" in problem


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_is_one_line_and_the_rest_goes_on(site: Site, how: str) -> None:
    """Whatever is wrong with a plugin: one line with its distribution, the cause and a way out; others load."""
    code, cause = BROKEN[how]
    site.install("ddl-broken", code, version="0.3", entry="broken")
    site.install("ddl-pigeon", GOOD)
    registry = site.load()
    assert "pigeon" in registry.transports
    (problem,) = registry.problems
    assert cause in problem
    assert "ddl-broken 0.3" in problem
    assert "DDL_PLUGINS_OFF=broken" in problem
    assert "\n" not in problem


def test_a_plugin_that_fails_halfway_offers_nothing(site: Site) -> None:
    """All or nothing: the transports of a plugin whose compressors hook raises are not in the registry."""
    site.install("ddl-half", GOOD + "\n    @hookimpl\n    def ddl_compressors(): raise OSError('wet')\n")
    registry = site.load()
    assert "pigeon" not in registry.transports
    assert len(registry.problems) == 1


def test_ctrl_c_while_plugins_load_is_not_swallowed(site: Site) -> None:
    """KeyboardInterrupt is the user's, not a plugin's."""
    site.install("ddl-slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.load()


def test_a_name_offered_twice_is_refused_by_naming_both(site: Site) -> None:
    """The first keeps the name; the line names both distributions and how to be rid of one."""
    site.install("ddl-a-pigeon", GOOD)
    site.install("ddl-b-pigeon", GOOD.replace("coop", "other_coop"))
    registry = site.load()
    (problem,) = registry.problems
    assert registry.transports["pigeon"].target == "coop:Pigeon"
    assert "ddl-b-pigeon 1.0 is refused: ddl-a-pigeon 1.0 offers that name already" in problem
    assert "DDL_PLUGINS_OFF=ddl-b-pigeon" in problem


def test_a_plugin_that_offers_a_name_twice(site: Site) -> None:
    """It is told otherwise than one that stands in another's way."""
    site.install("ddl-pigeon", GOOD.replace("return [", "return 2 * ["))
    registry = site.load()
    assert registry.problems == [
        "transport 'pigeon' of ddl-pigeon 1.0 is refused: ddl-pigeon 1.0 offers that name already; "
        "each needs a name of its own"
    ]


def test_what_a_plugin_prints_is_no_part_of_our_output(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes to standard error, so that --json stays JSON."""
    site.install("ddl-pigeon", "print('coo')\n" + textwrap.dedent(GOOD))
    assert "pigeon" in site.load().transports
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "coo\n")


def test_a_builtin_name_cannot_be_taken(site: Site) -> None:
    """A plugin that calls its transport solo does not replace the built-in one."""
    site.install("aaa-solo", GOOD.replace("pigeon", "solo"))
    registry = site.load()
    assert registry.transports["solo"].target.startswith("ddlcore.contracts.solo")
    assert "ddlcore" in registry.problems[0]


@pytest.mark.parametrize(("version", "accepted"), [((2, 0), True), ((2, 7), True), ((3, 0), False), ((1, 9), False)])
def test_the_contract_version_is_checked(site: Site, version: tuple[int, int], accepted: bool) -> None:
    """A provider built for another major version of the contract is refused, naming both versions."""
    site.install("ddl-pigeon", GOOD.replace('target="', f'api_version={version}, target="'))
    registry = site.load()
    assert ("pigeon" in registry.transports) is accepted
    assert len(registry.problems) == (not accepted)
    if not accepted:
        assert f"contract {version[0]}.{version[1]}, this ddlcore has 2.0" in registry.problems[0]


@pytest.mark.parametrize("target", ["coop", "coop:", ":Pigeon", "a:b:c", ""])
def test_a_malformed_target_is_refused(site: Site, target: str) -> None:
    """A target that is not module:name is found at start-up, not when the first job begins."""
    site.install("ddl-pigeon", GOOD.replace("coop:Pigeon", target))
    registry = site.load()
    assert "pigeon" not in registry.transports
    assert f"'{target}' is not of the form module:name" in registry.problems[0]


@pytest.mark.parametrize("word", ["ddl-pigeon", "ddl_pigeon", "DDL.Pigeon", "bird"])
def test_the_deny_list_keeps_a_plugin_from_loading(site: Site, word: str) -> None:
    """DDL_PLUGINS_OFF takes the entry point's or the distribution's name, however it is spelt; no code of it runs."""
    site.install("ddl-pigeon", "raise RuntimeError", entry="bird")
    registry = site.load(plugins_off=word)
    assert registry.problems == []
    assert "ddl_pigeon" not in sys.modules


def test_the_allow_list_loads_nothing_else(site: Site) -> None:
    """With DDL_PLUGINS set, the built-in parts and the named plugins are all there is."""
    site.install("ddl-pigeon", GOOD)
    site.install("ddl-other", "raise RuntimeError")
    registry = site.load(plugins="ddl-pigeon")
    assert registry.problems == []
    assert {"pigeon", "solo"} <= set(registry.transports)


@pytest.mark.parametrize("setting", ["plugins", "plugins_off"])
def test_a_listed_name_that_nobody_has_is_a_problem(site: Site, setting: str) -> None:
    """A typing error in either list is said, with the names there are."""
    site.install("ddl-pigeon", GOOD)
    registry = site.load(**{setting: "ddl-pidgeon"})
    line = f"DDL_{setting.upper()} names 'ddl-pidgeon'"
    assert any(line in problem and "ddl-pigeon" in problem for problem in registry.problems)


def test_environment_sets_the_lists() -> None:
    """The lists are ordinary settings, so the environment reaches them."""
    registry = load_plugins(load_settings({"DDL_PLUGINS_OFF": "nobody-has-this"}))
    assert any("nobody-has-this" in problem for problem in registry.problems)


def test_bench_peers_are_offered_through_their_hook(site: Site) -> None:
    """By name, with the distribution that brings them."""
    site.install("pigeon", "@hookimpl\ndef ddl_bench_peers(): return [BenchPeerProvider('pigeon', 'coop:Pigeon')]")
    registry = site.load()
    assert registry.problems == []
    assert str(registry.distribution(registry.named(Registry.bench_peers, "pigeon"))) == "pigeon 1.0"


def test_launchers_are_offered_through_their_hook(site: Site) -> None:
    """A plugin may bring a way of starting agents; ssh is built in and has settings of its own."""
    site.install("pigeon", "@hookimpl\ndef ddl_launchers(): return [LauncherProvider('pigeon', 'coop:Pigeon')]")
    registry = site.load()
    assert registry.problems == []
    assert {"ssh", "srun", "pigeon"} <= set(registry.launchers)
    assert [row.env for row in registry.named(Registry.launchers, "ssh").settings] == [
        "DDL_SSH_PORT",
        "DDL_SSH_IDENTITY_FILE",
    ]


def test_a_plugin_that_fails_says_where(site: Site) -> None:
    """File and line of its own code; it is installed, so nothing is said of pip."""
    site.install("ddl-broken", "import os\n\ndef deep():\n    raise OSError('wet')\n\ndeep()\n", entry="broken")
    (problem,) = site.load().problems
    assert re.search(r"OSError: wet \(\S+\.py:5\)", problem), problem
    assert "pip install" not in problem
