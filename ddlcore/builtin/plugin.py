"""The built-in parts, offered through the same hooks as anybody's."""

from __future__ import annotations

from ddlcore.config import Setting
from ddlcore.hooks import (
    AdapterProvider,
    ClusterProvider,
    CompressorProvider,
    FusionProvider,
    LauncherProvider,
    TransportProvider,
    hookimpl,
)

__all__ = [
    "ddl_adapters",
    "ddl_clusters",
    "ddl_compressors",
    "ddl_fusion_policies",
    "ddl_launchers",
    "ddl_transports",
]


HIERARCHICAL_SETTINGS = (
    Setting(
        "hierarchical_chunk_bytes",
        int,
        1 << 20,
        "across hosts: how much is reduced within a host, crosses, and is spread at a time, in bytes",
        minimum=4096,
    ),
    Setting(
        "hierarchical_shares",
        int,
        2,
        "across hosts: how many ranks of each host send and receive, each a share; 0: as many as every host has",
        minimum=0,
    ),
)


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """A world of one, a world of threads, the processes of one host, and these composed with what spans hosts."""
    return [
        TransportProvider(
            name="solo",
            target="ddlcore.builtin.solo:SoloTransport",
            doc="a world of one rank",
            priority=100,
            sizes=(1, 1),
        ),
        TransportProvider(
            name="threads",
            target="ddlcore.builtin.threads:ThreadsTransport",
            doc="ranks that are threads of one process",
            in_process=True,
            sizes=(2, None),
        ),
        TransportProvider(
            name="shm",
            target="ddlcore.builtin.shm.transport:ShmTransport",
            doc="shared memory among the processes of one host",
            platforms=("linux",),
            priority=50,
            one_host=True,
            sizes=(2, None),
        ),
        TransportProvider(
            name="hierarchical",
            target="ddlcore.builtin.hierarchical.transport:HierarchicalTransport",
            doc="one transport within the hosts, another across them: LOCAL+CROSS",
            composes=True,
            sizes=(2, None),
            settings=HIERARCHICAL_SETTINGS,
        ),
    ]


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """numpy arrays."""
    return [
        AdapterProvider(
            name="numpy",
            target="ddlcore.builtin.numpy_adapter:NumpyAdapter",
            doc="numpy arrays",
            module="ddlcore",
            framework="numpy",
        )
    ]


@hookimpl
def ddl_fusion_policies() -> list[FusionProvider]:
    """Filling batches up to a size."""
    return [
        FusionProvider(
            name="threshold",
            target="ddlcore.builtin.fusion:ThresholdFusion",
            doc="in order of readiness, up to fusion_bytes a batch",
        )
    ]


@hookimpl
def ddl_compressors() -> list[CompressorProvider]:
    """Values as they are, or as 16-bit floats on the way."""
    return [
        CompressorProvider("none", "ddlcore.builtin.compressors:NoCompression", doc="values travel as they are"),
        CompressorProvider("fp16", "ddlcore.builtin.compressors:Fp16Compression", doc="floats travel as float16"),
        CompressorProvider("bf16", "ddlcore.builtin.compressors:Bf16Compression", doc="floats travel as bfloat16"),
    ]


@hookimpl
def ddl_clusters() -> list[ClusterProvider]:
    """The launchers of others, each before those whose variables it may have inherited or sets as well."""
    known = (
        ("horovodrun", "Horovod", "Horovod's launcher"),
        ("torchrun", "Torchrun", "PyTorch's launcher"),
        ("openmpi", "OpenMpi", "mpirun of PRRTE and before it of ORTE"),
        ("pmix", "Pmix", "srun, prun and others that speak PMIx"),
        ("hydra", "Hydra", "MPICH's mpiexec and its kin, and others that speak PMI"),
        ("mvapich", "Mvapich", "mpirun_rsh of MVAPICH2"),
        ("flux", "Flux", "flux run"),
        ("pals", "Pals", "mpiexec of HPE Cray"),
        ("jsrun", "Jsrun", "jsrun of LSF"),
        ("slurm", "Slurm", "srun"),
        ("plain", "Plain", "RANK and WORLD_SIZE, by whoever sets them"),
        ("slurm-shell", "SlurmShell", "a batch script, which is no rank"),
    )
    return [
        ClusterProvider(name, f"ddlcore.builtin.clusters:{target}", doc=doc, priority=-10 * place)
        for place, (name, target, doc) in enumerate(known)
    ]


@hookimpl
def ddl_launchers() -> list[LauncherProvider]:
    """ssh, for hosts that the user names or a batch system grants; srun within an allocation of Slurm's."""
    by_ssh = (
        ("lsf", "LSB_JOBID", "ssh to the hosts of an LSF job"),
        ("pbs", "PBS_NODEFILE", "ssh to the hosts of a PBS job"),
        ("gridengine", "PE_HOSTFILE", "ssh to the hosts of a Grid Engine job"),
        ("cobalt", "COBALT_NODEFILE", "ssh to the hosts of a Cobalt job"),
    )
    return [
        LauncherProvider(
            name="ssh",
            target="ddlcore.builtin.ssh:SshLauncher",
            doc="ssh, or the remote shell that OMPI_MCA_plm_rsh_agent names",
            settings=(
                Setting("ssh_port", int, 0, "port of every host's sshd; 0: as ssh is configured", minimum=0),
                Setting("ssh_identity_file", str, "", "private key for ssh; empty: as ssh is configured"),
            ),
        ),
        LauncherProvider(
            name="srun",
            target="ddlcore.builtin.slurm:SrunLauncher",
            doc="srun, on the nodes of the allocation",
            priority=20,
            variables=("SLURM_JOB_ID",),
            whole=True,
        ),
        *(
            LauncherProvider(
                name=name,
                target="ddlcore.builtin.allocations:GrantedLauncher",
                doc=doc,
                priority=10,
                variables=(variable,),
            )
            for name, variable, doc in by_ssh
        ),
    ]
