"""Registers the built-in transports, adapters, policies and so on, through the same hooks as any plugin."""

from __future__ import annotations

from ddlcore.config.setting import Setting
from ddlcore.hooks import (
    AdapterProvider,
    ClusterProvider,
    CommandProvider,
    CompressorProvider,
    DiscoveryProvider,
    FusionProvider,
    LauncherProvider,
    ReleaseRange,
    TransportProvider,
    TunerProvider,
    hookimpl,
)


@hookimpl
def ddl_cli() -> list[CommandProvider]:
    """Return the providers of the core's own commands, in the order of `ddl --help`."""
    known = (
        ("run", "starts the ranks of a job"),
        ("info", "what is installed, and what is missing"),
        ("tune", "finds good settings"),
        ("plugins", "lists plugins"),
    )
    return [CommandProvider(name, f"ddlcore.commands.{name}.command:{name}", doc=doc) for name, doc in known]


@hookimpl
def ddl_tuners() -> list[TunerProvider]:
    """Return the providers of two tuners: a search by a Gaussian process, and a grid search without extra packages."""
    return [
        TunerProvider(
            "bayes",
            "ddlcore.builtin.tuners.bayes:BayesTuner",
            requires=("skopt", "threadpoolctl"),
            install="pip install 'ddlcore[tune]'",
            doc="Gaussian process, expected improvement (scikit-optimize)",
        ),
        TunerProvider(
            "grid", "ddlcore.builtin.tuners.grid:GridTuner", doc="knob by knob, from a coarse grid to fine ones"
        ),
    ]


@hookimpl
def ddl_transports() -> list[TransportProvider]:
    """Return the provider of the transport of a world of one rank. Plugins have the others."""
    return [
        TransportProvider(
            name="solo",
            target="ddlcore.contracts.solo:SoloTransport",
            doc="a world of one rank",
            priority=100,
            sizes=(1, 1),
        ),
    ]


@hookimpl
def ddl_adapters() -> list[AdapterProvider]:
    """Return the provider of the adapter for numpy arrays."""
    return [
        AdapterProvider(
            name="numpy",
            target="ddlcore.builtin.numpy_adapter:NumpyAdapter",
            doc="numpy arrays",
            module="ddlcore",
            framework="numpy",
            tested=(ReleaseRange("numpy", "1.26", "2.5"), ReleaseRange("numba", "0.60", "0.68")),
        )
    ]


@hookimpl
def ddl_fusion_policies() -> list[FusionProvider]:
    """Return the provider of the fusion policy that fills each bucket up to a size."""
    return [
        FusionProvider(
            name="threshold",
            target="ddlcore.builtin.fusion:ThresholdFusion",
            doc="in order of readiness, up to fusion_bytes a bucket",
        )
    ]


@hookimpl
def ddl_compressors() -> list[CompressorProvider]:
    """Return the providers of the compressors: one leaves values unchanged, the others send floats in 16 bits."""
    return [
        CompressorProvider("none", "ddlcore.builtin.compressors:Unchanged", doc="values travel as they are"),
        *(
            CompressorProvider(
                name,
                f"ddlcore.builtin.compressors:{name.title()}Compression",
                doc=f"floats travel as {label}",
            )
            for name, label in (("fp16", "float16"), ("bf16", "bfloat16"))
        ),
    ]


@hookimpl
def ddl_clusters() -> list[ClusterProvider]:
    """Return the providers of the clusters. The clusters are tried in the order of this list.

    A cluster recognises the processes of one launcher by environment variables. A process may also have variables of
    another launcher: the process inherits them, or its own launcher sets them too. So if the processes of launcher A
    may have variables of launcher B, the cluster for A is tried before the cluster for B.
    """
    known = (
        ("horovodrun", "Horovod", "Horovod's launcher"),
        ("torchrun", "Torchrun", "torchrun"),
        ("openmpi", "OpenMpi", "mpirun of PRRTE and before it of ORTE"),
        ("pmix", "Pmix", "srun, prun and others that speak PMIx"),
        ("hydra", "Hydra", "MPICH's mpiexec and its kin, and others that speak PMI"),
        ("mvapich", "Mvapich", "mpirun_rsh of MVAPICH2"),
        ("flux", "Flux", "flux run"),
        ("pals", "Pals", "mpiexec of HPE Cray"),
        ("jsrun", "Jsrun", "jsrun of LSF"),
        ("slurm", "Slurm", "srun"),
        ("plain", "Plain", "any launcher that sets RANK and WORLD_SIZE"),
        ("slurm-shell", "SlurmShell", "a batch script, which is no rank"),
    )
    return [
        ClusterProvider(name, f"ddlcore.builtin.clusters:{target}", doc=doc, priority=-10 * place)
        for place, (name, target, doc) in enumerate(known)
    ]


@hookimpl
def ddl_discoveries() -> list[DiscoveryProvider]:
    """Return the providers of host discoveries for elastic jobs: one runs a user's script, the other asks Slurm."""
    return [
        DiscoveryProvider(
            name="script",
            target="ddlcore.builtin.discovery:ScriptDiscovery",
            doc="what a script prints: --host-discovery-script FILE",
        ),
        DiscoveryProvider(
            name="slurm",
            target="ddlcore.builtin.discovery:SlurmDiscovery",
            doc="the nodes of the allocation that are up",
        ),
    ]


@hookimpl
def ddl_launchers() -> list[LauncherProvider]:
    """Return the providers of the launchers.

    One launcher uses srun on the nodes that Slurm grants. The other launchers use ssh, to hosts that the user names or
    that a batch system grants.
    """
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
                Setting(
                    "ssh_port", int, 0, "port of every host's sshd; 0: as ssh is configured", minimum=0, group="hosts"
                ),
                Setting(
                    "ssh_identity_file", str, "", "private key for ssh; empty: as ssh is configured", group="hosts"
                ),
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
