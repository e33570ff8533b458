"""What observes a rank: who is built, what happens if one cannot be, and what is said of one that is not installed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from ddlcore.config.loading import Settings, load_settings
from ddlcore.config.setting import Setting
from ddlcore.config.table import SETTINGS
from ddlcore.errors import PluginError
from ddlcore.hooks import ObserverProvider
from ddlcore.plug.registry import Distribution, Registry
from ddlcore.process.observers import ObservedRank, RankObserver, check_observers, observers

ROWS = (Setting("first", str, "", "what is asked of First"), Setting("second", str, "", "what is asked of Second"))
told: list[str] = []


class First(RankObserver):
    """Notes what happens to it in ``told``."""

    @classmethod
    def check(cls, settings: Settings, here: bool) -> None:
        if settings.text("first") == "wrong":
            raise ValueError("--first wrong: that is no place")
        told.append(f"{cls.__name__} checked, here: {here}")

    def __init__(self, rank: ObservedRank) -> None:
        told.append(f"{type(self).__name__} observes {rank.rank}")

    def close(self) -> None:
        told.append(f"{type(self).__name__} closed")


class Second(First):
    """Cannot observe."""

    def __init__(self, rank: ObservedRank) -> None:
        raise ValueError("the port is taken")


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    told.clear()


def registry_with(*targets: str) -> Registry:
    registry = Registry()
    for row, target in zip(ROWS, targets):
        registry.offer(
            ObserverProvider(target, f"{__name__}:{target}", settings=(row,), setting=row.name),
            Distribution("ddl-noting", "1.0"),
        )
    assert registry.problems == []
    return registry


def settings(**flags: object) -> Settings:
    return load_settings({}, None, flags, [*SETTINGS, *ROWS])


def rank(registry: Registry, local_rank: int = 0, **flags: object) -> Any:
    return SimpleNamespace(
        rank=3, registry=registry, settings=settings(**flags), launched=SimpleNamespace(local_rank=local_rank)
    )


def test_only_those_that_are_asked_for() -> None:
    """An observer that nobody asks for is not even imported."""
    registry = registry_with("First", "Missing")
    check_observers(settings(first="here"), registry, True)
    (one,) = observers(rank(registry, first="here"), {})
    one.close()
    assert told == ["First checked, here: True", "First observes 3", "First closed"]
    assert observers(rank(registry), {}) == []


def test_one_that_cannot_observe_ends_the_others() -> None:
    with pytest.raises(ValueError, match="the port is taken"):
        observers(rank(registry_with("First", "Second"), first="here", second="here"), {})
    assert told == ["First observes 3", "First closed"]


def test_what_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ValueError, match="--first wrong: that is no place"):
        check_observers(settings(first="wrong"), registry_with("First"), True)
    with pytest.raises(PluginError, match=r"observer 'Missing' of ddl-noting 1\.0: .* cannot be loaded"):
        check_observers(settings(first="here"), registry_with("Missing"), True)


@pytest.mark.parametrize("target", ["settings", "ROWS"])
def test_an_observer_must_be_one(target: str) -> None:
    with pytest.raises(PluginError, match=r"is no (ddlcore\.process\.observers\.)?RankObserver"):
        check_observers(settings(first="here"), registry_with(target), True)


def test_one_that_no_setting_asks_for_is_refused() -> None:
    registry = Registry()
    registry.offer(ObserverProvider("pigeon", "coop:Loft", setting="sample"), Distribution("ddl-pigeon", "1"))
    assert registry.observers == {}
    assert "'sample' is no setting of ddl or of this package" in registry.problems[0]


def test_a_package_that_only_the_launching_host_has(caplog: pytest.LogCaptureFixture) -> None:
    """The first rank of the host without it warns, so that nobody waits in vain for what it would tell."""
    with caplog.at_level(logging.WARNING, "ddl"):
        for local_rank in (0, 1):
            observers(rank(registry_with(), local_rank), {"DDL_METRICS_PORT": "9400", "DDL_SAMPLE_MS": "0"})
    (record,) = caplog.records
    assert record.getMessage().startswith("DDL_METRICS_PORT has no effect on this host; install it: pip install")
