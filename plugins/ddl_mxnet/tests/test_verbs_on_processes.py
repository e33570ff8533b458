"""Tests real processes under `ddl run`: all collectives under MXNet's engines, a peer's death, scripts that end."""

from __future__ import annotations

import pytest

from plugins.ddl_mxnet.tests.launching import PROGRAMS, launch, run_python

ENGINES = ("ThreadedEnginePerDevice", "NaiveEngine")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("engine", ENGINES)
def test_all_verbs_under_each_engine(engine: str) -> None:
    """All collectives work with the background and the naive engine; the script ends without a wait."""
    output = launch(2, PROGRAMS / "verbs.py", MXNET_ENGINE_TYPE=engine)
    assert output.count("done") == 2, output
    assert "Exception" not in output, output
    assert "Traceback" not in output, output


@pytest.mark.processes
def test_one_process_under_the_naive_engine() -> None:
    """All collectives, a backward pass and a trainer give their results, and the script ends well."""
    status, output = run_python((PROGRAMS / "naive.py").read_text(), "-W", "ignore", MXNET_ENGINE_TYPE="NaiveEngine")
    assert status == 0, output
    assert output.splitlines()[-1] == "done", output
    assert "Exception" not in output, output


@pytest.mark.long
@pytest.mark.processes
def test_a_lost_peer_is_named_by_a_wait_of_mxnets() -> None:
    """A wait of MXNet raises PeerLost itself with its ranks, although the error passed through MXNet's engine."""
    output = launch(2, PROGRAMS / "lose_a_peer.py", check=False)
    assert "lost (1,) within True: rank 1 lost" in output, output
    assert "Traceback" not in output, output


@pytest.mark.long
@pytest.mark.processes
def test_a_script_that_raises_ends_by_its_error() -> None:
    """If a script raises while MXNet's engine has work left, late callbacks do not abort the interpreter."""
    output = launch(2, PROGRAMS / "end_in_an_error.py", check=False)
    assert "rank 1 on" in output, output
    assert "failed first: it exited with code 1 " in output, output
    assert "PeerLost: rank 1 lost" in output, output
    assert "rank 0: exited with code 1" in output, output
    assert "terminate called" not in output, output


@pytest.mark.processes
def test_a_process_alone_that_raises_ends_by_its_error() -> None:
    """As ``test_a_script_that_raises_ends_by_its_error``, without a peer."""
    status, output = run_python((PROGRAMS / "raise_alone.py").read_text(), "-W", "ignore")
    assert output.splitlines()[-1] == "ValueError: the script's own", output
    assert status == 1
