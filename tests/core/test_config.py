"""Settings: which source wins, what each spelling means, and what a wrong one is told."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddlcore.config.file import read_toml
from ddlcore.config.loading import load_settings
from ddlcore.config.setting import Setting
from ddlcore.config.table import SETTINGS
from ddlcore.control.channel import Channel
from ddlcore.control.local import LocalNetwork
from ddlcore.errors import DdlInternalError, DeadlineExceeded
from ddlcore.messages.ranks import LaunchedRank, WorldRank
from ddlcore.messages.to_coordinator import ToCoordinator
from ddlcore.messages.to_rank import FromCoordinator, Lost, Refused
from ddlcore.plug.settings import settings_of
from ddlcore.process.build import build_sessions
from ddlcore.process.environment import Environment
from ddlcore.process.job import Job
from ddlcore.process.world_place import WorldPlace
from ddlcore.types import Placement

SWITCH = Setting("switch", bool, True, "a switch")
COUNT = Setting("count", int, 3, "a count", minimum=1)
RATE_S = Setting("rate_s", float, 0.5, "a rate")
RANK = LaunchedRank(0)  # of a job in this process
MODE = Setting("mode", str, "a", "a mode", choices=("a", "b"))
ROWS = (SWITCH, COUNT, RATE_S, MODE)


@pytest.mark.parametrize(
    ("raw", "value"),
    [("1", True), ("on", True), ("TRUE", True), ("0", False), ("no", False), ("", False), (True, True), (False, False)],
)
def test_switches(raw: object, value: bool) -> None:
    """Text as people write it, and TOML's own true and false."""
    assert SWITCH.parse(raw, "here") is value


@pytest.mark.parametrize(
    ("row", "raw", "words"),
    [
        (SWITCH, "maybe", "neither true nor false"),
        (SWITCH, 1, "not of type bool"),
        (COUNT, "many", "not of type int"),
        (COUNT, 1.5, "not of type int"),
        (COUNT, True, "not of type int"),
        (COUNT, "0", "below the least"),
        (RATE_S, "fast", "not of type float"),
        (RATE_S, "nan", "not of type float"),
        (RATE_S, math.nan, "not of type float"),
        (MODE, "c", "not one of a, b"),
    ],
)
def test_wrong_values_name_their_place(row: Setting, raw: object, words: str) -> None:
    """The message says where the value came from and what would do."""
    with pytest.raises(ValueError, match=words) as caught:
        row.parse(raw, "DDL_THIS")
    assert "DDL_THIS" in str(caught.value)


def test_a_choice_is_found_in_any_case() -> None:
    """As the table writes it."""
    assert MODE.parse("B", "here") == "b"


def test_flag_over_env_over_file_over_default() -> None:
    """Each source is told apart."""
    settings = load_settings({"DDL_COUNT": "5", "DDL_RATE_S": "2"}, {"count": 4, "mode": "b"}, {"rate_s": 1.0}, ROWS)
    assert dict(settings) == {"switch": True, "count": 5, "rate_s": 1.0, "mode": "b"}
    assert [settings.source(name) for name in settings] == ["default", "env", "flag", "file"]


def test_a_key_that_nothing_has_is_refused() -> None:
    """A misspelt key in a file does not pass in silence."""
    with pytest.raises(ValueError, match="no setting is called cuont"):
        load_settings({}, {"cuont": 4}, rows=ROWS)


def test_the_core_s_table_holds_together() -> None:
    """Names are unique, defaults parse as themselves, and units stand in the names."""
    assert len({row.name for row in SETTINGS}) == len(SETTINGS)
    for row in SETTINGS:
        assert row.parse(row.default, row.name) == row.default
        assert row.env == "DDL_" + row.name.upper()
        assert row.doc


def test_config_files(tmp_path: Path) -> None:
    """TOML in, one line out where there is no file or no TOML."""
    good = tmp_path / "good.toml"
    good.write_text('backend = "shm"\nfusion_bytes = 1024\n')
    assert load_settings({}, read_toml(good))["fusion_bytes"] == 1024
    with pytest.raises(ValueError, match="No such file"):
        read_toml(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("backend = ")
    with pytest.raises(ValueError, match=r"bad\.toml"):
        read_toml(bad)


def test_what_the_launcher_tells_a_rank_comes_back() -> None:
    """The variables are read as they were written; a part of them is an error that says how to start."""
    told = Environment(Placement(2, (0, 0, 1)), "/proc/1/fd/3", "10.0.0.2", "ssh")
    assert Environment.read(told.variables()) == told
    lone = Environment(Placement(0, (0,)), "/proc/1/fd/3")
    assert Environment.read({"DDL_ADDRESS": "10.9.9.9", **lone.variables()}) == lone, "a job within a job"
    del (bare := lone.variables())["DDL_ADDRESS"]
    assert Environment.read(bare) == lone
    assert Environment.read({}) is None
    with pytest.raises(ValueError, match="ddl run"):
        Environment.read({"DDL_JOB_FILE": "x"})


def test_placement_follows_from_the_hosts() -> None:
    """Local and cross ranks with uneven hosts whose ranks are interleaved."""
    hosts = (0, 1, 0, 1, 0)
    facts = [
        (p.local_rank, p.local_size, p.cross_rank, p.cross_size)
        for p in (Placement(r, hosts) for r in range(len(hosts)))
    ]
    assert facts == [(0, 3, 0, 2), (0, 2, 1, 2), (1, 3, 0, 2), (1, 2, 1, 2), (2, 3, 0, 1)]
    assert not Placement(0, hosts).is_homogeneous
    assert Placement(3, hosts).among((3, 1)).rank == 0
    assert Placement(0, (0, 0, 1, 1)).is_homogeneous


def test_a_transport_is_told_its_hosts_address() -> None:
    """What the launcher said of the route reaches the context that a transport opens with."""
    settings, registry = settings_of({})
    network = LocalNetwork(1, build_sessions(1, settings, registry))
    meet = lambda: (network.channel(RANK), network.store(RANK))  # noqa: E731
    job = Job(WorldPlace(Placement(0, (0,)), (RANK,), 1, address="10.0.0.2"), meet, registry, settings)
    job.start()
    try:
        assert job.context("part").address == "10.0.0.2"
    finally:
        job.shutdown()


def test_a_rank_whose_timeline_cannot_be_written_leaves(tmp_path: Path) -> None:
    """Its error names the file, and the others learn why it is gone."""
    settings, registry = settings_of({"DDL_TIMELINE": str(tmp_path)})
    network = LocalNetwork(1, build_sessions(1, settings, registry))
    job = Job(
        WorldPlace(Placement(0, (0,)), (RANK,), 1),
        lambda: (network.channel(RANK), network.store(RANK)),
        registry,
        settings,
    )
    before = threading.active_count()
    with pytest.raises(ValueError, match="is a directory; name a file"):
        job.start()
    assert job.closed
    assert threading.active_count() == before


class _Ending(Channel):
    """A line whose coordinator refuses the world, and is gone with the rank in which it lives."""

    def __init__(self, line: Channel) -> None:
        self._line = line
        self._read = False

    def send(self, message: ToCoordinator) -> None:
        pass

    def receive(self, timeout_s: float) -> list[FromCoordinator]:
        if self._read:
            time.sleep(0.01)
            return []
        self._read = True
        return [Refused("no fusion policy is called 'none'"), Lost((WorldRank(0),), "its process ended")]

    def wake(self) -> None:
        self._line.wake()

    def close(self) -> None:
        self._line.close()


def test_a_refusal_is_not_masked_by_the_end_of_who_refused() -> None:
    """Rank 0 refuses a setting and leaves; a rank that reads both messages at once raises the refusal."""
    settings, registry = settings_of({})
    network = LocalNetwork(2, build_sessions(2, settings, registry))
    ranks = (RANK, LaunchedRank(1))
    meet = lambda: (_Ending(network.channel(ranks[1])), network.store(ranks[1]))  # noqa: E731
    job = Job(WorldPlace(Placement(1, (0, 0)), ranks, 1), meet, registry, settings)
    with pytest.raises(DdlInternalError, match="no fusion policy is called 'none'"):
        job.start()


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_wait_in_init_give_up_with_the_first(first: int) -> None:
    """Whichever deadline passes first: both raise the same, which names the rank that has not come."""
    registry = settings_of({})[1]
    network = LocalNetwork(3, build_sessions(3, settings_of({})[0], registry))

    def start(rank: int) -> str:
        settings, _ = settings_of({"DDL_START_TIMEOUT_S": "1" if rank == first else "60"})
        meet = lambda: (network.channel(LaunchedRank(rank)), network.store(LaunchedRank(rank)))  # noqa: E731
        with pytest.raises(DeadlineExceeded) as caught:
            Job(
                WorldPlace(Placement(rank, (0, 0, 0)), tuple(map(LaunchedRank, range(3))), 1), meet, registry, settings
            ).start()
        return str(caught.value)

    begun_s = time.monotonic()
    with ThreadPoolExecutor(2) as ranks:
        texts = list(ranks.map(start, (0, 1)))
    text = "init: rank 2 of [0, 1, 2] had not called init() by then; waited 1 s (DDL_START_TIMEOUT_S)"
    assert texts == [text, text]
    assert time.monotonic() - begun_s < 30.0


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without what launchers set, in place of this process's own."""
    environ: dict[str, str] = {}
    monkeypatch.setattr("ddlcore.process.environment.os", SimpleNamespace(environ=environ))
    return environ


def test_what_other_libraries_read_is_added(bare: dict[str, str]) -> None:
    """As `ddl run` sets it: each rank's own place, one address for all, and IPv6 in brackets."""
    ports = [(1001, 1002), (2001, 2002), (3001, 3002)]
    Environment.announce(Placement(2, (0, 0, 1)), ports, ["10.0.0.1", "10.0.0.1", "fd00::2"])
    assert bare["TF_CONFIG"].startswith('{"cluster": {"worker": ["10.0.0.1:1001", "10.0.0.1:2001", "[fd00::2]:3001"]}')
    del bare["TF_CONFIG"]
    assert bare == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1002",
    }


def test_torchruns_variables_are_added_only_if_wanted(bare: dict[str, str]) -> None:
    """TensorFlow's is added in any case."""
    Environment.announce(Placement(0, (0, 0)), [(1, 2), (3, 4)], ["127.0.0.1"] * 2, torch_env=False)
    assert list(bare) == ["TF_CONFIG"]


def test_what_a_launcher_has_set_stays(bare: dict[str, str]) -> None:
    """Half an address is not completed; and where a host has no free ports nothing is said."""
    bare.update({"MASTER_ADDR": "theirs", "TF_CONFIG": "{}", "LOCAL_RANK": "7"})
    Environment.announce(Placement(0, (0, 0)), [(1, 2), (3, 4)], ["127.0.0.1"] * 2)
    assert bare["MASTER_ADDR"] == "theirs" and "MASTER_PORT" not in bare
    assert bare["TF_CONFIG"] == "{}" and bare["LOCAL_RANK"] == "7"
    assert bare["RANK"] == "0"
    bare.clear()
    Environment.announce(Placement(0, (0, 0)), [(1, 2), ()], ["127.0.0.1"] * 2)
    assert bare == {}


def test_a_key_that_is_no_setting_is_named_with_its_line(tmp_path: Path) -> None:
    """And with the setting that was probably meant."""
    path = tmp_path / "job.toml"
    path.write_text('# settings\nbackend = "shm"\n"fusion_bites" = 5\n')
    with pytest.raises(
        ValueError, match=r"job\.toml:3: no setting is called fusion_bites; did you mean fusion_bytes\?"
    ):
        load_settings({}, read_toml(path))
    path.write_text("\n\nfusion_bytes = -5\n")
    with pytest.raises(ValueError, match=r"job\.toml:3: -5 is below"):
        load_settings({}, read_toml(path))
    with pytest.raises(ValueError, match=r"config file, qqq: no setting is called qqq; there are "):
        load_settings({}, {"qqq": 1})
    path.write_bytes(b'backend = "\xff"')
    with pytest.raises(ValueError, match="not encoded in UTF-8"):
        read_toml(path)
