"""Who am I, by what launchers set: tables of variables as real launchers leave them, and what is wrong with others."""

from __future__ import annotations

import re
from abc import ABCMeta

import pytest

from ddlcore.builtin import clusters, plugin
from ddlcore.contracts import Cluster, RankInfo, Surroundings
from ddlcore.errors import PluginError
from ddlcore.plug import Distribution, Registry

Variables = dict[str, str]

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-15510@1",
    "PMIX_RANK": "1",
}
MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "0",
    "PMI_FD": "9",
    "PMI_HOSTNAME": "n2",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
}
STEP = {
    "SLURM_CLUSTER_NAME": "barnard",
    "SLURM_JOB_ID": "712",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
PROXY = [
    "/opt/mpich/bin/hydra_pmi_proxy",
    "--control-port",
    "n1:39119",
    "--rmk",
    "user",
    "--launcher",
    "ssh",
    "--proxy-id",
    "1",
]
INTEL = ["/opt/intel/bin/hydra_bstrap_proxy", "--upstream-host", "n1", "--upstream-port", "38041", "--pgid", "0"]
BATCH = {name: value for name, value in STEP.items() if "STEP" not in name}

KNOWN: list[tuple[str, Variables, list[list[str]], str, RankInfo]] = [
    ("torchrun", TORCHRUN, [], "torchrun", RankInfo(3, 4, 1, 2, "1", "none:n1:29500:1")),
    ("Open MPI 5", OPEN_MPI, [], "openmpi", RankInfo(1, 2, 1, 2, "vm", "prterun-vm-15510@1")),
    (
        "Open MPI 4",
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_ess_base_jobid": "3821928449"},
        [],
        "openmpi",
        RankInfo(0, 2, launch="3821928449"),
    ),
    ("MPICH", MPICH, [["sh", "-c", "python train.py"], PROXY], "hydra", RankInfo(2, 4, 0, 2, "n2", "n1:39119")),
    (
        "Intel MPI",
        MPICH,
        [["/opt/intel/bin/hydra_pmi_proxy", "--usize", "-1"], INTEL],
        "hydra",
        RankInfo(2, 4, 0, 2, "n2", "n1:38041"),
    ),
    (
        "PMI-2 of srun",
        {"PMI_RANK": "2", "PMI_SIZE": "3", **STEP},
        [],
        "hydra",
        RankInfo(2, 3, 0, None, "1", "barnard-712.0-r0"),
    ),
    (
        "PMIx of srun",
        {**STEP, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.712.0"},
        [],
        "pmix",
        RankInfo(2, 3, 0, None, "1", "slurm.pmix.712.0"),
    ),
    ("srun", STEP, [], "slurm", RankInfo(2, 3, 0, 1, "1", "barnard-712.0-r0")),
    (
        "srun, requeued",
        {
            "SLURM_JOB_ID": "9",
            "SLURM_STEP_ID": "4",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_RESTART_COUNT": "2",
        },
        [],
        "slurm",
        RankInfo(0, 2, launch="9.4-r2"),
    ),
    ("a batch script", BATCH, [], "slurm-shell", RankInfo(0, 1)),
    ("its batch step", {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB)}, [], "slurm-shell", RankInfo(0, 1)),
    ("srun --pty", {**STEP, "SLURM_PTY_PORT": "4711"}, [], "slurm-shell", RankInfo(0, 1)),
    (
        "torchrun as a task of a step",
        {**STEP, **TORCHRUN},
        [],
        "torchrun",
        RankInfo(3, 4, 1, 2, "1", "none:n1:29500:1"),
    ),
    (
        "by hand in a batch script",
        {**BATCH, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1234"},
        [],
        "plain",
        RankInfo(0, 2, launch="n1:1234"),
    ),
    (
        "MVAPICH2",
        {
            "MV2_COMM_WORLD_RANK": "1",
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_LOCAL_RANK": "0",
            "MV2_COMM_WORLD_LOCAL_SIZE": "1",
            "MPISPAWN_MPIRUN_HOST": "n1",
            "MPISPAWN_MPIRUN_PORT": "4000",
            "MPISPAWN_MPIRUN_ID": "77",
        },
        [],
        "mvapich",
        RankInfo(1, 2, 0, 1, "", "n1:4000:77"),
    ),
    (
        "Flux",
        {
            "FLUX_TASK_RANK": "1",
            "FLUX_JOB_SIZE": "2",
            "FLUX_TASK_LOCAL_ID": "1",
            "FLUX_JOB_ID": "f2x",
            "FLUX_KVS_NAMESPACE": "job-1",
        },
        [],
        "flux",
        RankInfo(1, 2, 1, None, "", "f2x:job-1"),
    ),
    (
        "PALS",
        {"PALS_RANKID": "3", "PALS_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1", "PALS_APID": "a-b-c"},
        [],
        "pals",
        RankInfo(3, 4, 1, None, "1", "a-b-c"),
    ),
    (
        "jsrun",
        {
            "JSM_NAMESPACE_RANK": "1",
            "JSM_NAMESPACE_SIZE": "2",
            "JSM_NAMESPACE_LOCAL_RANK": "1",
            "JSM_NAMESPACE_LOCAL_SIZE": "2",
            "LSB_JOBID": "81",
            "LS_JOBPID": "600",
        },
        [],
        "jsrun",
        RankInfo(1, 2, 1, 2, "", "81:600"),
    ),
    (
        "horovodrun",
        {
            "HOROVOD_RANK": "1",
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_HOSTNAME": "n2",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "3456",
            "RANK": "7",
        },
        [],
        "horovodrun",
        RankInfo(1, 2, 0, 1, "n2", "10.0.0.1:3456"),
    ),
]

WRONG: list[tuple[Variables, str]] = [
    ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set although OMPI_COMM_WORLD_RANK is"),
    ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}, "RANK is not set although TORCHELASTIC_RUN_ID is"),
    ({"PMI_RANK": "two", "PMI_SIZE": "4"}, "PMI_RANK='two' is no whole number"),
    ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK='-1' is no whole number"),
    ({"RANK": "²", "WORLD_SIZE": "4"}, "RANK='²' is no whole number"),
    ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 is not below WORLD_SIZE=0"),
    (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2",
    ),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 is more than WORLD_SIZE=2"),
    ({"PMIX_RANK": "0"}, "SLURM_STEP_NUM_TASKS is not set although PMIX_RANK is"),
    ({"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"}, "SLURM_PROCID is not set although SLURM_STEP_ID is"),
    ({**STEP, "SLURM_NODEID": "5"}, "SLURM_STEP_TASKS_PER_NODE=2,1 has no entry for SLURM_NODEID=5"),
]


def asked(variables: Variables, lineage: list[list[str]]) -> tuple[str, RankInfo | None]:
    """Every built-in cluster in its turn, as detection asks them."""
    registry = Registry()
    for provider in plugin.ddl_clusters():
        registry.offer(provider, Distribution("ddlcore", "0"))
    for provider in sorted(registry.clusters.values(), key=lambda one: -one.priority):
        rank_info = registry.load(provider)().rank_info(Surroundings(variables, "here", lambda: lineage))
        if rank_info is not None:
            return provider.name, rank_info
    return "", None


@pytest.mark.parametrize(
    ("variables", "lineage", "name", "rank_info"), [row[1:] for row in KNOWN], ids=[row[0] for row in KNOWN]
)
def test_a_launcher_is_recognised(
    variables: Variables, lineage: list[list[str]], name: str, rank_info: RankInfo
) -> None:
    """The first whose variables are there says who we are, whatever others have left behind."""
    found, told = asked(variables, lineage)
    assert found == name
    assert told is not None
    warning = told.warning
    assert RankInfo(told.rank, told.size, told.local_rank, told.local_size, told.host, told.launch) == rank_info
    assert bool(warning) == (name == "slurm-shell")


def test_no_launcher() -> None:
    """A plain shell, one with a single task of its own, and a variable that merely sounds like it are none."""
    for variables in ({}, {"WORLD_SIZE": "4"}, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "4"}):
        assert asked(variables, []) == ("", None)


@pytest.mark.parametrize(("variables", "text"), WRONG, ids=[text for _, text in WRONG])
def test_what_is_wrong_is_named(variables: Variables, text: str) -> None:
    """One line that names the variable and says what next."""
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        asked(variables, [])
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


def test_two_launches_have_two_names() -> None:
    """What differs between two launches that run at once differs in the name."""
    other_port = [[*PROXY[:2], "n1:39120"]]
    pairs = [
        (asked(MPICH, [PROXY]), asked(MPICH, other_port)),
        (asked(TORCHRUN, []), asked({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, [])),
        (asked(TORCHRUN, []), asked({**TORCHRUN, "MASTER_PORT": "29501"}, [])),
        (asked(STEP, []), asked({**STEP, "SLURM_STEP_ID": "1"}, [])),
        (asked(STEP, []), asked({**STEP, "SLURM_RESTART_COUNT": "1"}, [])),
    ]
    for (_, one), (_, two) in pairs:
        assert one is not None and two is not None
        assert one.launch and two.launch and one.launch != two.launch


def test_the_contract_is_kept() -> None:
    """Every provider names a Cluster; a class that is none is refused when it is loaded."""
    registry = Registry()
    for provider in plugin.ddl_clusters():
        registry.offer(provider, Distribution("ddlcore", "0"))
    assert registry.problems == []
    named = {provider.target.rpartition(":")[2] for provider in registry.clusters.values()}
    ours = {name for name, one in vars(clusters).items() if isinstance(one, ABCMeta) and issubclass(one, Cluster)}
    assert named == {name for name in ours if name != "Cluster" and not name.startswith("_")}
    wrong = plugin.ddl_clusters()[0].__class__("wrong", "ddlcore.builtin.clusters:RankInfo")
    registry.offer(wrong, Distribution("ddlcore", "0"))
    with pytest.raises(PluginError, match="is no Cluster"):
        registry.load(wrong)
