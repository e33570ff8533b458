"""Tests of the meeting before NCCL is called: all ranks come, with a device each and one NCCL, or all hear why not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from ddl_nccl import library, surroundings
from ddl_nccl.conformance import HostedTransport
from ddl_nccl.meeting import Arrival, objection
from ddl_nccl.standin import StandIn
from ddl_nccl.surroundings import chosen_interface, tell

from ddlcore.contracts.transport import Transport
from ddlcore.errors import DeadlineExceeded, TransportError
from plugins.ddl_nccl.tests.worlds import hosted, open_group

SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"
FINE = Arrival(0, 0, "GPU-a", 23203)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([Arrival(1, 0, "GPU-b", 23203), Arrival(2, 1, "GPU-a", 23203)], ""),
        ([Arrival(1, 0, "", 23203), Arrival(2, 0, "", 23203)], ""),
        ([Arrival(1, 0, "GPU-b", 23207)], "rank 0 has NCCL 2.32.3 and rank 1 2.32.7"),  # NCCL refuses that, too
        ([Arrival(1, 0, "GPU-b", 23203), Arrival(2, 0, "GPU-a", 23203)], "ranks 0 and 2 are on one GPU (GPU-a)"),
        ([Arrival(1, 0, "GPU-b", 22907)], "rank 0 has NCCL 2.32.3 and rank 1 2.29.7"),
        ([Arrival(1, 0, "GPU-b", 2708)], "rank 1 has NCCL 2.7.8, which is older than 2.14.0"),
        ([Arrival(1, 0, "GPU-b", 0, "nccl: no libnccl.so.2; pip install …")], "pip install … (on rank 1)"),
    ],
)
def test_who_can_be_served(others: list[Arrival], said: str) -> None:
    """The objection names the ranks that cannot be served and what to do, or is empty."""
    told = objection([FINE, *others])
    assert (said in told) if said else told == ""


def test_an_arrival_goes_there_and_back() -> None:
    """An arrival survives the conversion to bytes and back; other bytes are refused."""
    one = Arrival(7, 2, 'GPU-"ü"', 23203, "a\nb")
    assert Arrival.from_bytes(one.to_bytes()) == one
    with pytest.raises(ValueError, match="Expecting"):
        Arrival.from_bytes(b"pickle")


class Broken(StandIn):
    """A stand-in without libnccl, used on one rank."""

    def version(self) -> int:
        raise RuntimeError('Failure finding "libnccl.so.2"')


def test_a_rank_without_nccl_is_heard_of_by_all() -> None:
    """All ranks hear soon that one rank has no NCCL, instead of waiting for their timeout."""
    standin = StandIn()
    group = hosted(3, standin)
    group.transports[2]._communicator._given = Broken()  # type: ignore[attr-defined]  # this transport's own

    def play(rank: int, transport: Transport) -> None:
        begun_s = time.monotonic()
        with pytest.raises(TransportError, match=r"pip install nvidia-nccl.*\(on rank 5\)"):
            transport.open(group.context(rank))
        assert time.monotonic() - begun_s < 20.0
        transport.close()

    group.run(play)
    group.ranks.close()
    assert standin.alive() == [] and standin.faults == []


def test_two_ranks_on_one_gpu() -> None:
    """Two ranks on one GPU are named on both ranks, before NCCL is called."""
    standin = StandIn()
    group = hosted(2, standin)
    for transport in group.transports:
        assert isinstance(transport, HostedTransport)
        transport.device = 3

    def play(rank: int, transport: Transport) -> None:
        with pytest.raises(TransportError, match=r"ranks 1 and 3 are on one GPU \(pretend:3\)"):
            transport.open(group.context(rank))
        transport.close()

    group.run(play)
    group.ranks.close()


def test_ranks_that_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user lets ranks share a GPU, only NCCL decides whether it accepts that."""
    monkeypatch.setenv(SHARED, "1")
    standin = StandIn()
    group = hosted(2, standin)

    def play(rank: int, transport: Transport) -> None:
        assert isinstance(transport, HostedTransport)
        transport.device = 3
        with pytest.raises(TransportError, match=r"Duplicate GPU"):
            transport.open(group.context(rank))
        transport.close()

    group.run(play)
    group.ranks.close()
    assert standin.called == [] and standin.faults == []
    assert surroundings.identity({}, "GPU-a") == surroundings.identity({SHARED: "0"}, "GPU-a") == "GPU-a"


def test_two_wheels_in_one_environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Two wheels cause one warning for each host with the fix, and NCCL is used.

    The remaining library may be the one for which torch was built.
    """
    monkeypatch.setattr(library, "wheels", lambda: {"nvidia-nccl-cu13": "2.28.7", "nvidia-nccl-cu12": "2.27.3"})
    library.overwritten.cache_clear()
    try:
        with open_group(3, StandIn()):
            pass
        (told,) = [text for text in caplog.messages if "wheel" in text or "overwritten" in text]
        shown = library.library(StandIn())
    finally:
        monkeypatch.undo()
        library.overwritten.cache_clear()
    assert "nvidia-nccl-cu12 2.27.3 and nvidia-nccl-cu13 2.28.7 are installed in one environment" in told
    assert "pip uninstall nvidia-nccl-cu12 nvidia-nccl-cu13" in told
    assert shown is not None and shown.facts["but"] in told


def test_nccls_own_refusal_is_explained() -> None:
    """If a device has no identity, NCCL itself refuses two ranks on it, and the error has the same fix."""
    standin = StandIn()
    group = hosted(2, standin)

    def play(rank: int, transport: Transport) -> None:
        assert isinstance(transport, HostedTransport)
        transport.device = 3
        transport.anonymous = True
        with pytest.raises(TransportError, match=r"Duplicate GPU.*two ranks are on one GPU"):
            transport.open(group.context(rank))
        transport.close()

    group.run(play)
    group.ranks.close()


def test_who_did_not_come_is_named() -> None:
    """Rank 0 names the missing rank by its world rank; the other ranks say that rank 0 did not answer."""
    group = hosted(3, StandIn())

    def play(rank: int, transport: Transport) -> None:
        if rank == 2:
            return
        said = "rank 5 did not come within 0.5 s" if rank == 0 else "rank 0 did not answer"
        with pytest.raises(DeadlineExceeded, match=said):
            transport.open(replace(group.context(rank), timeout_s=0.5))
        transport.close()

    group.run(play)
    group.ranks.close()


def test_a_peer_that_dies_while_nccl_connects() -> None:
    """If a peer dies while NCCL connects, open ends in time, and a communicator that comes later is aborted."""
    standin = StandIn()
    standin.stuck = True
    group = hosted(2, standin)

    def play(rank: int, transport: Transport) -> None:
        begun_s = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"did not connect in 3 s"):
            transport.open(replace(group.context(rank), timeout_s=3.0))
        assert time.monotonic() - begun_s < 20.0
        transport.close()

    group.run(play)
    group.ranks.close()
    standin.release()
    until_s = time.monotonic() + 5.0
    while len([comm for comm in standin.made() if comm.ended == "abort"]) < 2 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(standin.made()) == 2 and standin.alive() == [] and standin.faults == []


# --- the environment variables that NCCL gets


def test_the_interface_reaches_nccl() -> None:
    """NCCL gets the interface by its exact name, also if an address was given; a variable of the user's is kept."""
    environ: dict[str, str] = {}
    tell(environ, {"network_interface": "none0,lo"})
    assert environ == {"NCCL_SOCKET_IFNAME": "=lo"}
    tell(environ, {"network_interface": "127.0.0.1"})
    assert chosen_interface("127.0.0.1") == "lo"
    environ[surroundings.INTERFACE] = "eth7"
    tell(environ, {"network_interface": "lo"})
    assert environ == {"NCCL_SOCKET_IFNAME": "eth7"}
    environ.clear()
    tell(environ, {})
    tell(environ, {"network_interface": ""})
    assert environ == {}


def test_calls_that_return_too_early_are_refused() -> None:
    """NCCL_COMM_BLOCKING=0 is refused, because it overrides the configuration and ddl needs calls that block."""
    with pytest.raises(TransportError, match=r"NCCL_COMM_BLOCKING=0 makes .* unset NCCL_COMM_BLOCKING"):
        tell({surroundings.BLOCKING: "0"}, {})
    tell({surroundings.BLOCKING: "1"}, {})


def test_an_interface_that_is_not_there() -> None:
    """The error for an unknown interface lists those that exist."""
    with pytest.raises(TransportError, match=r"nccl: no network interface is called none0 .*there are lo"):
        chosen_interface("none0")
