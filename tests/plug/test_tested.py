"""Releases of libraries: which are installed, and which are newer or older than those that plugins were tested with."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddlcore.contracts.library import installed_version, version_numbers
from ddlcore.hooks import AdapterProvider, ReleaseRange, TransportProvider
from ddlcore.plug.registry import Distribution, Registry
from ddlcore.plug.tested import LibraryRelease, library_releases, refused_releases


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the path of Python, in which a test installs distributions."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, distribution: str, version: str, module: str) -> None:
    """Put a distribution with one module into ``site``."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{module}.py,,\n")
    (site / f"{module}.py").write_text("raise AssertionError('it was imported')\n")


def zoo(*providers: AdapterProvider | TransportProvider) -> Registry:
    """Return a registry with ``providers``."""
    registry = Registry()
    for provider in providers:
        registry.offer(provider, Distribution("zoo", "1"))
    return registry


def test_the_version_of_a_module(site: Path) -> None:
    """It is found by the module's name, by another known name, and by a name that nobody knows, as of a nightly build."""
    install(site, "aviary", "1.2", "aviary")
    install(site, "parrots-cpu", "3.4", "parrots")
    install(site, "owls-nightly", "5.6.dev7", "owls")
    assert installed_version("aviary") == "1.2"
    assert installed_version("parrots", "parrots-gpu", "parrots-cpu") == "3.4"
    assert installed_version("owls", "owls-cpu") == "5.6.dev7"
    (site / "finches.py").write_text("")
    assert installed_version("finches") == ""


def test_a_module_that_is_absent_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most users lack most frameworks, and `ddl info` asks for each of them."""
    monkeypatch.setattr("ddlcore.contracts.library.metadata.distributions", lambda: pytest.fail("it searched"))
    assert installed_version("no_such_bird", "no-such-bird-cpu") == ""


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("2.4.0", ""),
        ("2.15.0+cpu", ""),
        ("2.15.9", ""),
        ("2.16.0.dev1", "newer than tested"),
        ("2.3.1", "older than tested"),
        ("10.0", "newer than tested"),
        ("", ""),
        ("nightly", ""),
    ],
)
def test_a_release_beside_the_tested_ones(version: str, told: str) -> None:
    """Only the numbers that a bound has are compared: 2.15.9 belongs to 2.15. Of no number, nothing is told."""
    assert LibraryRelease("birds", version, ReleaseRange("birds", "2.4", "2.15")).differs == told


def test_numbers_of_a_version() -> None:
    assert version_numbers("1.9.1.post0", 3) == (1, 9, 1)
    assert version_numbers("2.22.0rc0") == (2, 22)
    assert version_numbers("2.10.0+cu128", 9) == (2, 10, 0)


def test_what_several_plugins_were_tested_with(site: Path) -> None:
    """The releases that are in all ranges count; a framework without a range has a row, too, but no range."""
    install(site, "birds", "2.14.1", "birds")
    registry = zoo(
        AdapterProvider("birds", "x:Y", framework="birds", tested=(ReleaseRange("birds", "2.4", "2.15"),)),
        TransportProvider("flight", "x:Y", tested=(ReleaseRange("birds", "2.13", "2.9999"),)),
        AdapterProvider("bats", "x:Y", framework="bats"),
    )
    birds, bats = library_releases(registry, {"birds": ()})
    assert (birds.version, birds.range, birds.differs) == ("2.14.1", "2.13 to 2.15", "")
    assert (bats.module, bats.version, bats.range, bats.differs) == ("bats", "", "", "")
    assert LibraryRelease("birds", "1", ReleaseRange("birds", "1.9.1", "1.9.1")).range == "1.9.1"


def test_what_a_plugin_refuses(site: Path) -> None:
    """Its probe says so. A library that is not installed is no refusal."""
    install(site, "birds", "2.14.1", "birds")
    here = ReleaseRange("birds", "2.4", "2.15")
    registry = zoo(
        AdapterProvider("fussy", "x:Y", tested=(here,), probe=f"{__name__}:fussy"),
        AdapterProvider("fine", "x:Y", tested=(here,)),
        AdapterProvider("away", "x:Y", requires=("no_such_bird",), tested=(ReleaseRange("no_such_bird", "1", "2"),)),
    )
    assert refused_releases(registry) == {"adapter 'fussy'": "it is not a parrot"}


def fussy() -> str:
    """A probe that refuses."""
    return "it is not a parrot"
