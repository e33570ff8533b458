"""A server of many ranks gets the files it needs, or names the command that allows them."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from ddlcore.control.files import allow_files
from ddlcore.control.server import Server
from ddlcore.errors import DdlInternalError
from tests.control.echo import EchoCoordinator


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The process's own limits, which stand again after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_as_far_as_needed(limits: tuple[int, int]) -> None:
    """256 ranks do not fit below 512 files; the hard limit stays, and a small job changes nothing."""
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    allow_files(2)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, hard)
    Server(256, EchoCoordinator()).close()
    soft, still = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 2 * 256 < soft < 2048
    assert still == hard


def test_a_hard_limit_that_is_too_low_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the ranks, the limits, and the command."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    with pytest.raises(
        DdlInternalError, match=r"4096 ranks need 12416 .* open 256 \(hard limit: 1024\); run `ulimit -n 12416`"
    ):
        Server(4096, EchoCoordinator())


def test_a_system_that_refuses_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hard limit, and still no: the system has a limit of its own."""

    def refuse(which: int, limit: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    with monkeypatch.context() as patch:
        patch.setattr(resource, "setrlimit", refuse)
        with pytest.raises(DdlInternalError, match="hard limit: unlimited"):
            allow_files(512)
