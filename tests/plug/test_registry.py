"""A provider's class is imported when it is first used; what is missing is found without importing."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ddlcore import contracts
from ddlcore.contracts import BenchPeer, Check, Transport, forwarding
from ddlcore.contracts.known_bad import KnownBadCheck
from ddlcore.errors import PluginError
from ddlcore.hooks import (
    BenchPeerProvider,
    CheckProvider,
    CommandProvider,
    RecorderProvider,
    TransportProvider,
    WatchProvider,
)
from ddlcore.plug import ALIASES, Distribution, Registry
from ddlcore.plug.registry import Refusal
from ddlcore.text.installing import pip_install
from tests.plug.conftest import forget

ORIGIN = Distribution("ddl-pigeon", "2.5")


def registry_with(provider: TransportProvider | CommandProvider) -> Registry:
    registry = Registry()
    registry.offer(provider, ORIGIN)
    assert registry.problems == []
    return registry


def test_load_imports_the_class() -> None:
    """``load`` gives the very class that the target names."""
    provider = TransportProvider("pigeon", "ddlcore.contracts:Transport")
    assert registry_with(provider).load(provider) is Transport


def probed(probe: str, library: str = "") -> tuple[Registry, TransportProvider]:
    """A provider with that probe and library, functions of a module of its own."""
    target = "ddlcore.contracts:Transport"
    provider = TransportProvider("pigeon", target, install="pip install corn", probe=probe, library=library)
    return registry_with(provider), provider


@pytest.fixture
def loft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that must not be imported, with a module whose functions are asked."""
    (tmp_path / "loft").mkdir()
    (tmp_path / "loft" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "loft" / "answers.py").write_text(
        "from ddlcore.contracts import Library\n"
        "def nothing(): return ''\n"
        "def hawk(): return 'a hawk is about; wait'\n"
        "def broken(): raise OSError('no eyes')\n"
        "def corn(): return Library('corn 2', 20000)\n"
        "def wrong(): return 'corn'\n"
        "from ddlcore.contracts import Check\n"
        "class Look(Check):\n"
        "    def look(self, host): pass\n"
        "    def judge(self, seen): return ()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "loft.answers:"
    forget(tmp_path)


def test_a_probe_says_what_else_is_missing(loft: str) -> None:
    """Without importing its package; one that fails is a reason, too."""
    registry, provider = probed(loft + "nothing")
    assert registry.missing(provider) == "" and registry.load(provider) is Transport
    registry, provider = probed(loft + "hawk")
    with pytest.raises(PluginError, match="cannot be used: a hawk is about; wait"):
        registry.load(provider)
    registry, provider = probed(loft + "broken")
    assert "failed: OSError: no eyes (" in registry.missing(provider)
    assert "answers.py:4)" in registry.missing(provider)  # where somebody has to look
    registry, provider = probed(loft + "absent")
    assert "AttributeError" in registry.missing(provider)


def test_a_check_is_loaded_without_its_package(loft: str) -> None:
    """It looks at what may be broken, as the package's imports are here; a transport needs them."""
    registry = Registry()
    check, transport = CheckProvider("loft", loft + "Look"), TransportProvider("loft", loft + "Look")
    registry.offer(check, ORIGIN)
    registry.offer(transport, ORIGIN)
    assert registry.load(check).__name__ == "Look"
    del sys.modules["loft.answers"]
    with pytest.raises(PluginError, match="AssertionError: imported"):
        registry.load(transport)


def test_the_library_behind_a_provider(loft: str) -> None:
    """Where that can be used, and loads."""
    registry, provider = probed("", loft + "corn")
    found = registry.library(provider)
    assert found is not None and found.version == 20000
    for probe, library in ((loft + "hawk", loft + "corn"), ("", loft + "broken"), ("", loft + "wrong"), ("", "")):
        registry, provider = probed(probe, library)
        assert registry.library(provider) is None


def test_load_follows_a_dotted_name() -> None:
    """The part behind the colon may reach into a class or an object."""
    provider = CommandProvider("pigeon", f"{__name__}:Loft.command")
    assert registry_with(provider).load(provider) is Loft.command


class Loft:
    """What the author of a command may write, and what is none."""

    command = click.Command("pigeon")

    @staticmethod
    def function() -> None: ...


@pytest.mark.parametrize("target", ["Loft", "Loft.function"])
def test_a_command_must_be_a_click_command(target: str) -> None:
    """Else the help of all commands would break."""
    provider = CommandProvider("pigeon", f"{__name__}:{target}")
    with pytest.raises(PluginError, match=re.escape(f"{__name__}:{target} is no Command")):
        registry_with(provider).load(provider)


@pytest.mark.parametrize("target", [f"{__name__}:Loft", f"{__name__}:Loft.function"])
def test_a_watch_must_be_one(target: str) -> None:
    registry, provider = Registry(), WatchProvider("pigeon", target, setting="verify_every")
    registry.offer(provider, ORIGIN)
    with pytest.raises(PluginError, match=r"is no (ddlcore\.launch\.job\.watch\.)?Watch"):
        registry.load(provider)


@pytest.mark.parametrize("name", ["check", "known_bad"])
def test_a_check_may_be_imported_by_either_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin may import the class from ddlcore.contracts or from the package that defines it. Both are accepted."""
    monkeypatch.delitem(sys.modules, "ddlcore.contracts.check", raising=False)
    target = {"check": "ddl_doctor.checks.system:LimitsCheck", "known_bad": "ddl_horovod.checks:KnownBadHorovod"}[name]
    registry, provider = Registry(), CheckProvider("look", target)
    registry.offer(provider, ORIGIN)
    assert issubclass(registry.load(provider), KnownBadCheck if name == "known_bad" else Check)


@pytest.mark.parametrize("name", ["Check", "BenchPeer"])
def test_a_contract_whose_package_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to install the package. Questions that Python asks any module get the usual answer."""
    monkeypatch.setattr(forwarding, "find_spec", lambda package: None)
    with pytest.raises(ModuleNotFoundError, match=r"is in a package of its own; pip install .*ddl_doctor"):
        getattr(contracts, name)
    module = importlib.import_module("ddlcore.contracts.check")
    assert not hasattr(module, "__wrapped__")
    registry, provider = Registry(), CheckProvider("look", "ddlcore.contracts:Transport")
    registry.offer(provider, ORIGIN)
    with pytest.raises(PluginError, match=r"ddlcore\.contracts:Transport is no ddlcore\.contracts\.check\.Check"):
        registry.load(provider)


def test_a_watch_may_ask_by_a_setting_of_ddl_doctor() -> None:
    """The provider is accepted. Without ddl-doctor, nobody can set this setting, so the watch is not built."""
    registry = Registry()
    registry.offer(WatchProvider("pigeon", "coop:Watch", setting="pulse_s"), ORIGIN)
    assert set(registry.watches) == {"pigeon"}


def test_a_recorder_that_nobody_would_use_is_refused() -> None:
    registry = Registry()
    registry.offer(RecorderProvider("films", "coop:Films"), ORIGIN)
    assert registry.recorders == {} and "start_timeline() uses the recorder that is called" in registry.problems[0]


@pytest.mark.parametrize("setting", ["", "verify_evry"])
def test_a_watch_that_no_setting_asks_for_is_refused(setting: str) -> None:
    """It would never be built, and nobody would know why."""
    registry = Registry()
    registry.offer(WatchProvider("pigeon", "coop:Watch", setting=setting), ORIGIN)
    assert registry.watches == {}
    assert f"'{setting}' is no setting of ddl or of this package; name one in" in registry.problems[0]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (("pigeon", ("dove",)), ("hawk", ("dove",)), "its alias 'dove' is a command already"),
        (("pigeon", ()), ("hawk", ("pigeon",)), "its alias 'pigeon' is a command already"),
        (("pigeon", ("hawk",)), ("hawk", ()), "its name is an alias of another command"),
    ],
)
def test_a_word_is_one_command(
    first: tuple[str, tuple[str, ...]], second: tuple[str, tuple[str, ...]], words: str
) -> None:
    registry = Registry()
    for name, aliases in (first, second):
        registry.offer(CommandProvider(name, "coop:command", aliases=aliases), ORIGIN)
    assert list(registry.commands) == [first[0]]
    assert words in registry.problems[0]


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("surely_not_there:Pigeon", "No module named 'surely_not_there'"),
        ("ddlcore.contracts:Pigeon", "AttributeError"),
        ("ddlcore.contracts:Adapter", "is no Transport"),
        ("ddlcore.contracts:API_VERSION", "is no Transport"),
    ],
)
def test_load_names_distribution_and_cause(target: str, cause: str) -> None:
    """What cannot be loaded is a PluginError with who and why."""
    provider = TransportProvider("pigeon", target)
    with pytest.raises(PluginError) as caught:
        registry_with(provider).load(provider)
    text = str(caught.value)
    assert text.startswith("transport 'pigeon' of ddl-pigeon 2.5")
    assert cause in text
    assert "pip install" not in text  # to install it again would not change it


def test_load_says_what_is_missing_before_importing() -> None:
    """A provider whose needs are not met is refused with its own install line; its module is not touched."""
    provider = TransportProvider(
        "pigeon", "ddlcore.contracts:Transport", requires=("surely_not_there",), install="pip install corn"
    )
    with pytest.raises(PluginError, match="surely_not_there not installed; pip install corn"):
        registry_with(provider).load(provider)


@pytest.mark.parametrize(
    ("requires", "missing"),
    [
        ((), ""),
        (("json",), ""),
        (("json.decoder", "xml.dom.minidom"), ""),
        (("json.nothing",), "json.nothing not installed; pip install json"),
        (("surely_not.there", "json"), "surely_not.there not installed; pip install surely_not"),
        (("json.decoder.deeper",), "json.decoder.deeper not installed; pip install json"),
    ],
)
def test_missing_looks_without_importing(requires: tuple[str, ...], missing: str) -> None:
    """Dotted names are followed on disk: neither they nor their parents are imported."""
    provider = TransportProvider("pigeon", "coop:Pigeon", requires=requires)
    had_minidom = "xml.dom" in sys.modules
    assert registry_with(provider).missing(provider) == missing
    assert ("xml.dom" in sys.modules) == had_minidom


def test_missing_does_not_run_a_parent_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework whose import would raise, or take seconds, can still be listed."""
    package = tmp_path / "explosive_framework"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    provider = TransportProvider("pigeon", "coop:Pigeon", requires=("explosive_framework.part",))
    assert registry_with(provider).missing(provider) == ""


def test_missing_sees_a_hidden_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that was hidden (None in sys.modules) counts as not installed."""
    monkeypatch.setitem(sys.modules, "json", None)
    provider = TransportProvider("pigeon", "coop:Pigeon", requires=("json",))
    assert "json not installed" in registry_with(provider).missing(provider)


def test_missing_knows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider for other platforms says so in one line."""
    provider = TransportProvider("pigeon", "coop:Pigeon", platforms=("linux", "freebsd"))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert registry_with(provider).missing(provider) == "works on linux and freebsd only; this is darwin"


@pytest.mark.parametrize("name", ALIASES["transport"])
def test_a_known_transport_that_is_not_installed_has_its_pip_line(name: str) -> None:
    """Asking for a transport of a plugin that is not there answers with the line that installs it."""
    with pytest.raises(
        PluginError,
        match=f"no transport is called '{name}'; install it: {re.escape(pip_install(ALIASES['transport'][name]))}",
    ):
        Registry().transport(name)


def test_an_unknown_name_lists_those_there_are() -> None:
    """A name that nobody knows answers with the names that are on offer."""
    registry = registry_with(TransportProvider("pigeon", "coop:Pigeon"))
    with pytest.raises(PluginError, match="no transport is called 'dove'; there are pigeon"):
        registry.named(Registry.transports, "dove")
    with pytest.raises(PluginError, match="no compressor is called 'dove'; there are none"):
        registry.named(Registry.compressors, "dove")


def test_an_unknown_name_says_why_its_provider_was_refused() -> None:
    """If the name was offered and refused, the reason is in the error."""
    registry = Registry()
    registry.offer(TransportProvider("pigeon", "coop:Pigeon", api_version=(9, 0)), ORIGIN)
    with pytest.raises(PluginError, match="built for plugin contract 9"):
        registry.named(Registry.transports, "pigeon")


def test_a_name_that_the_lists_leave_out() -> None:
    """The user's own list is what keeps it away, so that is said."""
    registry = Registry()
    registry.refusals.append(Refusal(ORIGIN, "pigeon", "", "DDL_PLUGINS_OFF names it", off=True))
    with pytest.raises(
        PluginError, match=r"no transport is called 'pigeon'.*; ddl-pigeon 2.5 is off: DDL_PLUGINS_OFF names it"
    ):
        registry.named(Registry.transports, "pigeon")


def test_bench_peers_have_a_door_of_their_own() -> None:
    """Offered, found by name and loaded like the rest; what is no BenchPeer is refused."""
    registry = Registry()
    good = BenchPeerProvider("pigeon", "ddlcore.contracts:BenchPeer")
    wrong = BenchPeerProvider("snail", "ddlcore.contracts:Transport")
    for provider in (good, wrong):
        registry.offer(provider, ORIGIN)
    assert registry.load(registry.named(Registry.bench_peers, "pigeon")) is BenchPeer
    with pytest.raises(PluginError, match=r"bench peer 'snail' of ddl-pigeon 2\.5: .* is no BenchPeer"):
        registry.load(registry.named(Registry.bench_peers, "snail"))


def test_an_unknown_bench_peer_is_named_with_what_there_is() -> None:
    """The line that installs it, where one is known; else the names."""
    registry = Registry()
    registry.offer(BenchPeerProvider("pigeon", "coop:Pigeon"), ORIGIN)
    with pytest.raises(PluginError, match="no bench peer is called 'owl'; there are pigeon"):
        registry.named(Registry.bench_peers, "owl")
    with pytest.raises(
        PluginError, match=f"no bench peer is called 'mpi'; install it: {re.escape(pip_install('ddl-mpi'))}"
    ):
        registry.named(Registry.bench_peers, "mpi")
