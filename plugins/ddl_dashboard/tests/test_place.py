"""Where the live page is served, and what is said where it cannot be."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from ddl_dashboard import place as place_module
from ddl_dashboard.place import FIRST_PORT, Place, listen, place_of, url_of

from ddlcore.commands.cli import main
from ddlcore.commands.run import command as run_module
from ddlcore.launch.job.launcher import JobDescription
from ddlcore.plug import registry as registry_module
from ddlcore.plug.finding import find
from ddlcore.plug.settings import absent_setting, settings_of
from ddlcore.text.installing import pip_install


@pytest.mark.parametrize(
    ("text", "host", "port", "local"),
    [
        ("auto", "127.0.0.1", 0, True),
        ("8500", "127.0.0.1", 8500, True),
        ("localhost:8500", "localhost", 8500, True),
        ("127.0.0.2:0", "127.0.0.2", 0, True),
        ("[::1]:8500", "::1", 8500, True),
        ("0.0.0.0:8500", "0.0.0.0", 8500, False),
        ("[::]:8500", "::", 8500, False),
        ("node1.cluster:8500", "node1.cluster", 8500, False),
    ],
)
def test_places(text: str, host: str, port: int, local: bool) -> None:
    """Only this host may be served without a token."""
    place = place_of(text)
    assert (place, place.is_local) == (Place(host, port), local)


@pytest.mark.parametrize(
    "text", ["here", "node1", "node1:", ":8500", "8500x", "a b:8500", "http://x:1", "127.0.0.1:-1"]
)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ValueError, match=r"that is no PORT and no HOST:PORT"):
        place_of(text)


def test_a_port_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"--dashboard 66000: 66000 is no port number"):
        place_of("66000")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_a_port_that_is_taken(taken: int) -> None:
    """Named, with what to do instead."""
    with pytest.raises(
        ValueError, match=rf"--dashboard 127\.0\.0\.1:{taken}: the port is taken; without a port, the next"
    ):
        listen(Place(port=taken))


def test_the_next_free_port() -> None:
    """Without a port that the user has named."""
    with listen(Place()) as first, listen(Place()) as second:
        ports = [one.getsockname()[1] for one in (first, second)]
        assert FIRST_PORT <= ports[0] < ports[1] < FIRST_PORT + 20


def test_no_port_is_free(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.setattr(place_module, "FIRST_PORT", taken)
    monkeypatch.setattr(place_module, "_PORTS", 1)
    with pytest.raises(ValueError, match=f"the ports {taken} to {taken} are all taken"):
        listen(Place())


def test_a_host_that_is_not_this_one() -> None:
    with pytest.raises(ValueError, match=r"--dashboard 192\.0\.2\.1:8500: "):
        listen(Place("192.0.2.1", 8500))
    with pytest.raises(ValueError, match=r"--dashboard nowhere\.invalid:8500: no address is known for this host"):
        listen(Place("nowhere.invalid", 8500))


def test_the_address_for_a_browser() -> None:
    """Complete, so that it can be clicked on."""
    with listen(Place()) as listening:
        port = listening.getsockname()[1]
        assert url_of(listening, Place(), "") == f"http://127.0.0.1:{port}/"
    with listen(Place("0.0.0.0")) as listening:
        port = listening.getsockname()[1]
        place = Place("0.0.0.0")
        assert url_of(listening, place, "secret") == f"http://{socket.gethostname()}:{port}/?token=secret"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[JobDescription]:
    """What would have been started."""
    seen: list[JobDescription] = []

    def note(launch: JobDescription) -> int:
        seen.append(launch)
        return 0

    monkeypatch.setattr(run_module, "run_job", note)
    return seen


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--dashboard", "true", "x"], "auto"),
        (["--dashboard", "-m", "timeit"], "auto"),
        (["--dashboard", "--", "true"], "auto"),
        (["--dashboard", "--replay", "true"], "auto"),
        (["--dashboard", "8500", "true"], "8500"),
        (["--dashboard=0.0.0.0:8500", "true"], "0.0.0.0:8500"),
        (["--dashboard", "node1:8500", "true", "--dashboard"], "node1:8500"),
        (["true", "--dashboard"], ""),
    ],
)
def test_the_port_may_be_left_out(words: list[str], setting: str, launches: list[JobDescription]) -> None:
    """What follows the option is then the command, or another option."""
    assert main(["run", "-np", "2", *words]) == 0
    assert launches[0].settings.text("dashboard") == setting
    assert launches[0].command[-1] == words[-1] or launches[0].command[-1].endswith("/true")


@pytest.mark.parametrize(
    ("value", "absent", "words"),
    [
        ("8500", "uvicorn", f"uvicorn not installed; {pip_install('ddl-dashboard')}"),
        ("8500", "plotly", f"plotly not installed; {pip_install('ddl-dashboard')}"),
        ("66000", "", "--dashboard 66000: 66000 is no port number; the highest is 65535"),
    ],
)
def test_what_is_refused_before_anything_starts(
    value: str, absent: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, with exit code 2."""
    found = find
    monkeypatch.setattr(registry_module, "find", lambda name: None if name == absent else found(name))
    assert main(["run", "-np", "2", "--dashboard", value, "true"]) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("words", [["--dashboard", "true"], ["--dashboard=8500", "true"]])
def test_without_the_package(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option says what to do; a variable has no effect, and that is said."""
    monkeypatch.setenv("DDL_PLUGINS_OFF", "ddl-dashboard")
    assert main(["run", "-np", "2", *words]) == 2
    assert "--dashboard: ddl-dashboard 0.1.0 is off: " in capsys.readouterr().err
    monkeypatch.setenv("DDL_DASHBOARD", "auto")
    with pytest.warns(UserWarning, match="DDL_DASHBOARD has no effect here; ddl-dashboard 0.1.0 is off"):
        settings, registry = settings_of(os.environ)
    assert "dashboard" not in settings
    registry.refusals.clear()
    assert absent_setting("dashboard", registry) == f"install it: {pip_install('ddl-dashboard')}"
    with pytest.raises(ValueError, match=r"^dashboard: ddl-dashboard 0\.1\.0 is off"):
        settings_of({"DDL_PLUGINS_OFF": "ddl-dashboard"}, {"dashboard": "auto"})
