"""The environment of a rank says who it is, to us and to scripts of other libraries."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence

import pytest

from ddlcore.config.loading import load_settings
from ddlcore.control.ports import free_ports, is_free
from ddlcore.launch.ranks.environment import (
    THREAD_VARIABLES,
    HostFacts,
    RankVariables,
    late_environment,
    master_port,
    own_environments,
    setting_variables,
    shared_environment,
    thread_variables,
)
from ddlcore.process.environment import TORCHRUN_VARIABLES, Environment
from ddlcore.types import Placement


def rank_environments(
    environ: Mapping[str, str], hosts: Sequence[int], job_file: str, added: Mapping[str, str], port: int
) -> list[dict[str, str]]:
    """Return the environment of each rank of a job on this host, as the launcher makes it."""
    shared = shared_environment(environ, added)
    return [{**shared, **own} for own in own_environments(hosts, (HostFacts(job_file),), port)]


def test_ranks_are_told_who_they_are() -> None:
    """RANK and its kin are torchrun's; ours is read back; the rest of the environment is passed on."""
    base = {"HOME": "/home/u", "RANK": "7", "DDL_INIT_PID": "5"}
    environments = rank_environments(base, (0, 0, 0), "/job", {"X": "1"}, 29500)
    for rank, environment in enumerate(environments):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "29500")
        assert (environment["HOME"], environment["X"], environment["PYTHONUNBUFFERED"]) == ("/home/u", "1", "1")
        assert "DDL_INIT_PID" not in environment  # a rank is no child of another job's rank
        read = Environment.read(environment)
        assert read is not None
        assert (read.placement.rank, read.placement.size, read.job_file) == (rank, 3, "/job")


def test_torchs_variables_can_be_left_out() -> None:
    """Also those that this process has itself; ours and TF_CONFIG stay."""
    (own,) = own_environments((0,), (HostFacts("/job"),), 29500, RankVariables(torchrun=False))
    assert not own.keys() & set(TORCHRUN_VARIABLES)
    assert {"DDL_RANK", "DDL_JOB_FILE", "TF_CONFIG"} <= own.keys()
    given = {**dict.fromkeys(TORCHRUN_VARIABLES, "7"), "COLOUR": "red"}
    assert set(TORCHRUN_VARIABLES) <= shared_environment(given, {}).keys()
    left = shared_environment(given, {}, torch_env=False)
    assert left["COLOUR"] == "red" and not left.keys() & set(TORCHRUN_VARIABLES)


def told_by(text: str) -> RankVariables:
    return RankVariables.of(load_settings({}, flags={"rank_variables": text}))


def test_ranks_are_told_their_place_by_any_name() -> None:
    """The names are those of the setting rank_variables. A rank that is started later is told its place, too."""
    named = told_by("R=rank, S=size,LR=local_rank,LS=local_size,CR=cross_rank,CS=cross_size,AT=address")
    places = (HostFacts("/job", "10.0.0.1"), HostFacts("", "10.0.0.2"))
    last = {"R": "2", "S": "3", "LR": "1", "LS": "2", "CR": "0", "CS": "1", "AT": "10.0.0.2"}
    own = own_environments((0, 1, 1), places, 29500, named)
    assert own[2].items() >= last.items() and own[2]["RANK"] == "2" and own[0]["AT"] == "10.0.0.1"
    late = late_environment(Placement(2, (0, 1, 1)), places[1], "10.0.0.1", 29500, RankVariables(False, named.named))
    assert late.items() >= last.items() and "RANK" not in late
    few = late_environment(Placement(1, (0, 1, -1, -1)), places[1], "10.0.0.1", 29500, named)  # two are not there yet
    assert few.items() >= {"R": "1", "S": "4", "LR": "0", "LS": "1", "CR": "1", "CS": "2"}.items()
    (alone,) = own_environments((0,), (HostFacts("/job"),), 29500, named)
    assert alone["AT"] == "127.0.0.1"


@pytest.mark.parametrize("text", ["R", "R=", "R=place", "=rank", "A-B=rank", "DDL_RANK=size", "R=rank;S=size"])
def test_names_of_a_place_that_are_none(text: str) -> None:
    """The error has the part that is wrong, and what can be said."""
    with pytest.raises(ValueError, match="is not of the form NAME=FACT; FACT: rank, size"):
        told_by(text)


def test_master_addr_is_the_address_of_rank_0s_host() -> None:
    """Also if rank 0 is not on the first host, nor on the host of the launcher; each rank is told its own host's address."""
    places = (HostFacts("/job", "10.0.0.1", (5, 6)), HostFacts("", "10.0.0.2", (7, 8)))
    environments = own_environments((1, 0, 1), places, 29500)
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in environments} == {("10.0.0.2", "29500")}
    assert [e["DDL_ADDRESS"] for e in environments] == ["10.0.0.2", "10.0.0.1", "10.0.0.2"]
    assert [e["GROUP_RANK"] for e in environments] == ["1", "0", "1"]
    workers = json.loads(environments[0]["TF_CONFIG"])["cluster"]["worker"]
    assert workers == ["10.0.0.2:7", "10.0.0.1:5", "10.0.0.2:8"]


def test_tf_config_is_one_cluster_with_a_port_a_rank() -> None:
    """The cluster is the same for all, the index is the rank's."""
    configs = [json.loads(e["TF_CONFIG"]) for e in rank_environments({}, (0, 0), "/job", {}, 29500)]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
    workers = configs[0]["cluster"]["worker"]
    assert configs[1]["cluster"]["worker"] == workers
    assert len({worker.rpartition(":")[2] for worker in workers} | {"29500"}) == 3


@pytest.mark.parametrize(("cores", "ranks", "share"), [(8, 2, "4"), (8, 3, "2"), (2, 32, "1"), (4, 1, "4")])
def test_threads_are_each_ranks_share_of_the_cores(cores: int, ranks: int, share: str) -> None:
    """At least one, and never against what the user has set."""
    assert thread_variables({}, cores, ranks) == dict.fromkeys(THREAD_VARIABLES, share)
    assert "OMP_NUM_THREADS" not in thread_variables({"OMP_NUM_THREADS": "7"}, cores, ranks)


def test_settings_travel_by_environment() -> None:
    """What came by flag or file is passed on; what is in the environment stands there already."""
    settings = load_settings({"DDL_GRACE_S": "3"}, {"fusion_bytes": 1, "grace_s": 9.0}, {"backend": "shm"})
    assert setting_variables(settings) == {"DDL_BACKEND": "shm", "DDL_FUSION_BYTES": "1"}


def test_ports_are_free_and_different() -> None:
    """And a port that somebody listens at is not free."""
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])):
        assert not is_free(ports[0])
        with pytest.raises(ValueError, match=f"port {ports[0]} .* is taken"):
            master_port({"MASTER_PORT": str(ports[0])})
    assert master_port({"MASTER_PORT": str(ports[0])}) == ports[0]


@pytest.mark.parametrize("port", ["x", "0", "70000", "", "²"])
def test_a_master_port_that_is_none(port: str) -> None:
    """It is refused with what to do."""
    with pytest.raises(ValueError, match="is no port; unset it"):
        master_port({"MASTER_PORT": port})
